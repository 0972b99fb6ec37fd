"""`python -m tools.profile`: a running server's step times, routing and hand-off cost, as a profile for `tools.dtmc`.

Takes the difference of two looks at the metrics page, so it may run beside production traffic:

    python -m tools.profile --metrics-url http://127.0.0.1:8002/metrics --seconds 60 --output profile.yaml
    python -m tools.profile --metrics-url http://127.0.0.1:8002/metrics --seconds 60 --load --output profile.yaml

Comments in the file say how many observations stand behind each number. Every batch size up to the number in flight
that is tuned for should have been seen; --load sees to that with rising numbers of its own requests.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated
from urllib.error import URLError

import typer

from tokenrouter.metrics_page import Scrape, scrape
from tools.dtmc.errors import ProfileError
from tools.dtmc.network import build_network
from tools.dtmc.profile import Profile, parse_profile
from tools.errors import reported
from tools.load import PROMPTS, in_turn, read_prompts, run_stages, stages
from tools.profile.measured import evaluate, to_yaml
from tools.progress import LateProgress
from tools.targets import target_file

_POLL_S = 0.2


def profile_text(before: Scrape, after: Scrape, source: str) -> tuple[str, Profile]:
    """The profile as YAML text, and as the tuner reads it.

    Raises:
        ProfileError: there was too little traffic, or the tuner would refuse the profile.
    """
    text = to_yaml(evaluate(before, after, source))
    profile = parse_profile(text)
    build_network(profile, 2)
    return text, profile


def look(url: str) -> Scrape:
    """One look at the metrics page.

    Raises:
        ProfileError: nothing answers there.
    """
    try:
        return scrape(url)
    except (URLError, OSError, ValueError) as exc:
        raise ProfileError(f"{url}: {getattr(exc, 'reason', exc)}; give the URL of a running server's metrics") from exc


@reported()
def main(
    metrics_url: Annotated[str, typer.Option(help="The metrics page.")] = "http://127.0.0.1:8002/metrics",
    output: Annotated[Path, typer.Option(help="File to write.", callback=target_file())] = Path("profile.yaml"),
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to observe.")] = 30.0,
    load: Annotated[bool, typer.Option("--load", help="Send requests meanwhile.")] = False,
    url: Annotated[str, typer.Option(help="With --load: Triton's gRPC endpoint.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="With --load: the entry model.")] = "tokenrouter",
    prompts: Annotated[Path, typer.Option(help="With --load: JSON lines with a field 'prompt'.")] = PROMPTS,
    inflight: Annotated[int, typer.Option(min=1, help="With --load: most requests at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --load: tokens of a response.")] = 64,
) -> None:
    """Measures a profile."""
    request = in_turn(model, read_prompts(prompts), max_tokens) if load else None
    with LateProgress() as report:
        before = look(metrics_url)
        if request is not None:
            run_stages(url, request, in_flight=stages(inflight), seconds=seconds, report=report)
        else:
            _wait(seconds, report)
        under = " under load of its own" if load else ""
        source = f"{metrics_url} in {seconds:g} s{under} on {datetime.now(timezone.utc).date()}"
        text, profile = profile_text(before, look(metrics_url), source)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, "utf-8")
    print(f"{output}: {', '.join(profile.names)}")


def _wait(seconds: float, report: LateProgress) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        report("observing", passed / seconds)
        time.sleep(min(_POLL_S, seconds - passed))


if __name__ == "__main__":
    typer.run(main)
