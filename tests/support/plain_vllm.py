"""A blocking trainer's client: vLLM's bodies, through `requests`, knowing nothing of us."""

from __future__ import annotations

from typing import Any, Self

import requests

TIMEOUT = 20


class PlainClient:
    """Posts what vLLM's own HTTP client posts; raises what it raises."""

    def __init__(self, base_url: str, **headers: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers.update(headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()

    def post(self, route: str, body: Any = None, **query: Any) -> Any:
        answer = self.raw("POST", route, body, **query)
        answer.raise_for_status()
        return answer.json()

    def get(self, route: str, **query: Any) -> Any:
        answer = self.raw("GET", route, **query)
        answer.raise_for_status()
        return answer.json()

    def raw(self, method: str, route: str, body: Any = None, **query: Any) -> requests.Response:
        url = f"{self.base_url}/{route}"
        return self.session.request(method, url, json=body, params=query or None, timeout=TIMEOUT)

    # vLLM's client
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        return self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> Any:
        return self.post("start_weight_update")

    def update_weights(self, update_info: Any) -> Any:
        return self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> Any:
        body = None if weight_version is None else {"weight_version": weight_version}
        return self.post("finish_weight_update", body)

    def shutdown_weight_transfer_engine(self) -> Any:
        return self.post("shutdown_weight_transfer_engine")
