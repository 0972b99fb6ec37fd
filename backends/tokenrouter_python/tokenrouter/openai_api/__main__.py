"""`python -m tokenrouter.openai_api`: serves `/v1` for a model repository whose Triton runs already."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from tokenrouter.channel.address import Address
from tokenrouter.errors import ConfigError, RouterError
from tokenrouter.openai_api.app import Settings, create_app
from tokenrouter.openai_api.deployment import Deployment
from tokenrouter.triton.process import spare_collector

_GRPC_PORT = 8001


def main(
    model_repository: Annotated[Path, typer.Option(help="The model repository that Triton serves.")] = Path(
        "model_repository"
    ),
    entry: Annotated[str | None, typer.Option(help="Entry model, if there are several.")] = None,
    url: Annotated[str, typer.Option(help="host:port of Triton's gRPC endpoint.")] = "127.0.0.1:8001",
    metrics_url: Annotated[str | None, typer.Option(help="Triton's metrics page, for /metrics.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 9000,
    api_key: Annotated[str | None, typer.Option(envvar="TOKENROUTER_API_KEY", help="Bearer token of clients.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file instead of the tokenizer's template.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request body.")] = 4 << 20,
    chat_tokens: Annotated[int, typer.Option(min=1, help="Default of max_tokens in a chat.")] = 512,
    playground: Annotated[bool, typer.Option(help="Whether / is a page to try routing on.")] = True,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="TOKENROUTER_TLS_CERT", help="PEM file of the certificate.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="TOKENROUTER_TLS_KEY", help="PEM file of its key.")] = None,
    exit_timeout: Annotated[int, typer.Option(min=0, help="Seconds that running responses get at the end.")] = 10,
) -> None:
    """Serves an OpenAI-compatible API in front of Triton."""
    try:
        endpoint = _endpoint(url)
        template = chat_template.read_text("utf-8-sig") if chat_template is not None else None
        deployment = Deployment(model_repository, entry, template)
        _check_tls(tls_cert, tls_key)
    except (RouterError, OSError, UnicodeDecodeError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise typer.Exit(2) from exc
    settings = Settings(endpoint, metrics_url, api_key or None, max_body_bytes, chat_tokens, playground)
    app = create_app(deployment, settings)
    spare_collector()
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=exit_timeout,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )


def _endpoint(url: str) -> str:
    """host:port of this address.

    Raises:
        ConfigError: it is none; gRPC would say so at the first request only.
    """
    try:
        return str(Address.parse(url, _GRPC_PORT))
    except ValueError as exc:
        raise ConfigError(f"--url: {exc}") from exc


def _check_tls(cert: Path | None, key: Path | None) -> None:
    """Whether a server can start with these files.

    Raises:
        ConfigError: one of them is missing, or they are no certificate and its key.
    """
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together: give both PEM files, or none")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except OSError as exc:  # ssl.SSLError among them
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: {exc}; give a PEM certificate and its key") from exc


if __name__ == "__main__":
    typer.run(main)
