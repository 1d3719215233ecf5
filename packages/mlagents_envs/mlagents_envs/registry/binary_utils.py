"""`mlagents_envs.registry.binary_utils` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.envs.registry import (
    read_manifest as load_local_manifest,
)
from pipeline.envs.registry import (
    read_manifest as load_remote_manifest,
)

__getattr__ = _missing.reasons(
    {
        "logger": "the module's own logger; use `logging.getLogger(__name__)`",
        "BLOCK_SIZE ZipFileWithProgress download_and_extract_zip get_local_binary_path get_local_binary_path_if_exists get_tmp_dirs print_progress": "a part of a download; `RemoteRegistryEntry.executable()` does it all",
    },
    __name__,
)
