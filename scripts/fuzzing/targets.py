"""The targets by name. Each is in a separate module, which is imported when the target runs."""

from importlib import import_module

from fuzzing.cases import FuzzTarget

TARGETS = {
    "checkpoint-manifests": "fuzzing.checkpoint_manifests:ManifestTarget",
    "checkpoint-files": "fuzzing.checkpoint_files:CheckpointFileTarget",
    "dcp-folders": "fuzzing.dcp_folders:DcpFolderTarget",
    "server-strangers": "fuzzing.server_strangers:ServerStrangerTarget",
    "server-peers": "fuzzing.server_peers:ServerPeerTarget",
    "backend-strangers": "fuzzing.backend_strangers:BackendStrangerTarget",
    "backend-peers": "fuzzing.backend_peers:BackendPeerTarget",
    "jobs": "fuzzing.jobs:JobTarget",
    "run-files": "fuzzing.run_files:RunFileTarget",
    "corpora": "fuzzing.corpora:CorpusTarget",
}


def target_class(name: str) -> type[FuzzTarget]:
    """The class of a target, or of a `module:class` that a test plants."""
    module, _, class_name = TARGETS.get(name, name).partition(":")
    loaded: type[FuzzTarget] = getattr(import_module(module), class_name)
    return loaded
