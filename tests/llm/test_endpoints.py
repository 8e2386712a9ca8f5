"""What an endpoint refuses, since it would write a key down or tell it."""

from __future__ import annotations

import pytest

from remind.core.errors import ConfigError
from remind.llm.endpoints import EndpointConfig

KEY = "sk-secret-0123456789abcdef"


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"base_url": url}
            for url in (f"user:{KEY}@h/v1", KEY, f"https:/{KEY}", f"ftp://{KEY}/v1", "http://h:99999/v1")
        ),
        *(
            {"base_url": f"https://{rest}"}
            for rest in (f"user:{KEY}@h/v1", f"h/v1?k={KEY}", f"h/v1#{KEY}", f"[{KEY}/v1")
        ),
        {"key_env": KEY},
    ],
)
def test_what_may_be_a_key_is_refused_and_not_told(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))) as refused:
        EndpointConfig("m", **fields).check()  # type: ignore[arg-type]
    assert KEY not in str(refused.value)


def test_https_needs_a_key_however_it_is_written() -> None:
    for scheme in ("https", "HTTPS"):
        assert EndpointConfig("m", base_url=f"{scheme}://h/v1").needs_key
    assert not EndpointConfig("m", base_url="HTTP://h/v1").needs_key
