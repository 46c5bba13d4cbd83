"""The page of the HTTP edge: one self-contained document that draws `/api/v1/job` and `/api/v1/events`.

Everything that comes from the job is set as text, never as markup. If the master has a token, put it behind the `#` of
the address (`http://…/#TOKEN`), which browsers do not send.
"""

from __future__ import annotations

from importlib.resources import files

__all__ = ("PAGE", "PAGE_POLICY")

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

PAGE = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
