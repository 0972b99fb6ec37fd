"""Replicas of a deployment's models: each is a model of the repository, with GPUs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from tokenrouter.config.model_yaml import VERSION_FOLDER
from tokenrouter.replicas import replica_names
from tools.build_repository.spec import ModelSpec


def replicas_of(name: str, model: ModelSpec) -> dict[str, ModelSpec]:
    """Every replica as a model of its own: the GPUs of one host are dealt out in order, each replica gets as many.

    The version folder of the first one holds the checkpoint of all, if it is not elsewhere.
    """
    share = len(model.gpus) // model.replicas
    found = {}
    for number, replica in enumerate(replica_names(name, model.replicas)):
        gpus = model.gpus[number * share : (number + 1) * share] if isinstance(model.host, str) else model.gpus
        shared = number and model.checkpoint == VERSION_FOLDER
        checkpoint = f"../../{name}/1" if shared else model.checkpoint
        options = model.options
        if model.engine == "torch" and len(gpus) == 1:
            options = {"device": f"cuda:{gpus[0]}", **options}
        host = model.host if isinstance(model.host, str) else model.host[number]
        found[replica] = replace(model, replicas=1, gpus=gpus, checkpoint=checkpoint, options=options, host=host)
    return found


def expanded(models: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """All replicas of all models by name, small first."""
    return {name: own for model, of in models.items() for name, own in replicas_of(model, of).items()}


def replica_problems(model: ModelSpec) -> Iterator[str]:
    """GPUs that cannot be dealt out."""
    if isinstance(model.host, str) and len(model.gpus) % model.replicas:
        yield (
            f"replicas is {model.replicas}, but gpus names {len(model.gpus)}; name as many GPUs for each replica, "
            "those of the first one first"
        )
    if model.replicas > 1 and model.gpus and "device" in model.options:
        yield f"options.device is {model.options['device']!r}, but each replica has its own GPU; leave it out"
