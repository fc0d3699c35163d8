"""`--help` of a command: its flags by subject, in 80 columns, and no name is cut."""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from cli.config_file import config_option

PANELS: Mapping[str, str] = {
    "Model": """model_path served_model_name context_length load_format quantization dtype kv_cache_dtype
        speculative_num_steps""",
    "Processes": """prefill_nodes decode_nodes prefill_ranks decode_ranks gateways ranks nnodes node_rank dist_init_addr
        step_timeout drain_timeout""",
    "Device and memory": """device mem_fraction_static hisparse_config max_total_tokens max_device_slots page_size
        attention_backend disable_cuda_graph debug_verify_swap_in""",
    "Scheduling": """max_running_requests max_queued_requests chunked_prefill_size allow_local_prefill prefill_retries
        prefill_timeout""",
    "Prefixes": """enable_prefix_caching fetch_prefixes prefix_cache_per_key routing max_routed_tokens
        kv_events_config""",
    "KV transfer": "transfer_protocol transfer_host transfer_ports ib_device transfer_checksum transfer_timeout",
    "Addresses and keys of processes": """host port metrics_port control_port control_host advertise_host key_dir
        insecure""",
    "Clients": """api_keys api_key_file priority_key_file allow_priority operator_key_file allowed_origins
        ssl_certfile ssl_keyfile""",
    "Requests": """request_timeout token_timeout migration_limit chat_template tool_call_parser reasoning_parser
        strict_fields""",
    "Limits": """max_concurrent_requests max_body_mib max_total_body_mib max_answer_mib max_total_answer_mib
        header_timeout""",
    "Logs, traces and status": "log_level log_format otlp_traces_endpoint status_page",
}
"""The fields of configurations by subject, in the order of --help. Fields without a subject come after them."""
PANEL_OF = {field: panel for panel, fields in PANELS.items() for field in fields.split()}
_OTHERS = "Options"


class GroupedCommand(TyperCommand):
    """A command that takes --config, and whose help has a section for each subject."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **options: Any) -> None:
        super().__init__(*args, params=[*(params or ()), config_option()], **options)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        in_order = {field: place for place, field in enumerate(PANEL_OF)}
        for parameter in sorted(self.get_params(ctx), key=lambda each: in_order.get(each.name, len(in_order))):
            if (record := parameter.get_help_record(ctx)) is not None:
                panel = getattr(parameter, "rich_help_panel", None) or _OTHERS
                sections.setdefault(panel, []).append(record)
        for panel, records in sections.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
