"""What `serve` says against its flags before it starts a process. Imports no torch, so that it takes no time."""

from dataclasses import replace

from cli.config import ServeConfig
from cli.serve import LOOPBACK
from hisparse.config import parse_config
from model.checkpoint import read_json
from service.checkpoint import identify
from service.config import check_clients
from service.node_checks import check


def check_start(config: ServeConfig) -> None:
    """Raises StartupError for what one of the processes would refuse, as far as flags and small files tell.

    Before any is started: the others would load a model meanwhile.
    """
    # Nodes stay on the loopback interface.
    check(replace(config, host=LOOPBACK, insecure=False))
    check_clients(config.host, bool(config.api_keys or config.api_key_file), config.insecure)
    identify(config.model_path)
    top_k = read_json(config.model_path / "config.json").get("index_topk")
    if isinstance(top_k, int):  # else it is no model that nodes take, which they say
        parse_config(config.hisparse_config, top_k)
