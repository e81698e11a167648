"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
  """Becomes an error response; `param` names the field at fault."""

  def __init__(self, message: str, *, status: int = 400, param: str | None = None,
               code: str | None = None) -> None:
    super().__init__(message)
    self.status, self.param, self.code = status, param, code

  def body(self) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
