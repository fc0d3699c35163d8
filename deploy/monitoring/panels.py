"""What the dashboard shows: every panel with its queries."""

from dataclasses import dataclass

EVERY = 'job="hisparse-pd"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """A time series. `queries` map what a line is called to what it shows, in `unit` (Grafana's name for it)."""

    title: str
    unit: str
    queries: dict[str, str]
    says: str = ""
    stacked: bool = False


def selected(component: str, *more: str) -> str:
    """A selector for the processes of a kind that the dashboard's variable lets through."""
    return "{" + ", ".join((EVERY, f'component="{component}"', 'instance=~"$instance"', *more)) + "}"


GATEWAY, PREFILL, DECODE = selected("gateway"), selected("prefill"), selected("decode")
ASKED = selected("gateway", 'endpoint=~"/v1/.*"')
FAILED = selected("gateway", 'endpoint=~"/v1/.*"', 'status=~"5.."')
STAGES = {
    "queue": ("Queue at the decode node", "Waits for host slots and for a prefill node."),
    "prefill_queue": ("Queue at the prefill node", "Waits for its turn."),
    "prefill": ("Prefill", "From the first chunk to the last, or to the end of a fetch."),
    "transfer": ("Transfer", "What is left to write when all is computed."),
    "admission": ("Admission", "In host memory, waits for a hot buffer."),
    "first_step": ("First step", "From a hot buffer to the first token."),
}


def quantiles(metric: str, selector: str) -> dict[str, str]:
    return {
        f"p{percent}": f"histogram_quantile({percent / 100:g}, sum by (le) (rate({metric}_bucket{selector}{RATE})))"
        for percent in (50, 95, 99)
    }


def stage(name: str) -> Panel:
    """A stage of requests before their first token, a line for each length of prompts."""
    title, says = STAGES[name]
    series = selected("prefill|decode", f'stage="{name}"').replace('component="', 'component=~"')
    expression = f"sum by (le, prompt) (rate(hisparse_pd_stage_seconds_bucket{series}{RATE}))"
    lines = {f"p{of} {{{{prompt}}}}": f"histogram_quantile({of / 100:g}, {expression})" for of in (50, 95)}
    return Panel(title, "s", lines, f"{says} By length of the prompt in tokens.")


def rate(metric: str, selector: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate({metric}{selector}{RATE}))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Clients": (
        Panel(
            "Time to first token",
            "s",
            quantiles("hisparse_pd_ttft_seconds", GATEWAY) | {"objective": "hisparse_pd:ttft_seconds:objective"},
            "From a request's arrival at a gateway.",
        ),
        Panel(
            "Inter-token latency",
            "s",
            quantiles("hisparse_pd_inter_token_seconds", GATEWAY)
            | {"objective": "hisparse_pd:inter_token_seconds:objective"},
        ),
        Panel(
            "Requests that ended",
            "reqps",
            {"{{reason}}": rate("hisparse_pd_requests_finished_total", GATEWAY, "reason")},
            "queue_full is a 429, timeout a 504; cancelled: the client left.",
            stacked=True,
        ),
        Panel(
            "Requests at gateways",
            "short",
            {"{{state}}": f"sum by (state) (hisparse_pd_requests{GATEWAY})"},
            "waiting: no token has come yet.",
            stacked=True,
        ),
        Panel(
            "Error ratio",
            "percentunit",
            {
                "{{endpoint}}": f"{rate('hisparse_pd_http_requests_total', FAILED, 'endpoint')} / "
                f"{rate('hisparse_pd_http_requests_total', ASKED, 'endpoint')}"
            },
            "Answers with a status of 500 and more. A stream that breaks has begun with 200: see the reasons above.",
        ),
        Panel(
            "Refused requests",
            "reqps",
            {
                "{{reason}}": rate("hisparse_pd_http_refused_total", GATEWAY, "reason"),
                "all with 429": rate("hisparse_pd_http_requests_total", selected("gateway", 'status="429"'), "status"),
            },
            "By the gateway before they were served; a 429 is one of these, or all decode nodes are full.",
        ),
    ),
    "Stages until the first token": tuple(map(stage, STAGES)),
    "Nodes": (
        Panel(
            "Registered nodes",
            "short",
            {"{{role}} at {{instance}}": f"hisparse_pd_nodes{GATEWAY}"},
            "As each gateway counts them; a node that drains is not one of them.",
        ),
        Panel("Prompt tokens computed", "short", {"{{instance}}": rate("hisparse_pd_prompt_tokens_total", PREFILL)}),
        Panel("Tokens generated", "short", {"{{instance}}": rate("hisparse_pd_generated_tokens_total", DECODE)}),
        Panel(
            "Decode batch",
            "short",
            {
                "{{instance}}": f"{rate('hisparse_pd_decode_batch_size_sum', DECODE)} / "
                f"{rate('hisparse_pd_decode_batch_size_count', DECODE)}"
            },
            "Requests per step, on average.",
        ),
    ),
    "Queues": (
        Panel(
            "Prompt tokens waiting",
            "short",
            {"{{instance}}": f"hisparse_pd_prompt_tokens_waiting{PREFILL}"},
            "Prefill nodes are scaled by these, and by the prompts that they belong to.",
        ),
        Panel(
            "Requests waiting for memory",
            "short",
            {
                "{{instance}}": "sum by (instance) (hisparse_pd_requests"
                + selected("decode", 'state=~"waiting|landed"')
                + ")"
            },
            "For host slots, or for a hot buffer. What decode nodes are scaled by.",
        ),
        Panel(
            "Requests at prefill nodes",
            "short",
            {"{{instance}} {{state}}": f"hisparse_pd_requests{PREFILL}"},
        ),
        Panel(
            "Requests at decode nodes",
            "short",
            {"{{state}}": f"sum by (state) (hisparse_pd_requests{DECODE})"},
            stacked=True,
        ),
    ),
    "Memory": (
        Panel(
            "Host slots",
            "short",
            {"{{instance}} {{state}}": f"hisparse_pd_host_slots{DECODE}"},
            "A slot is a token in all layers. Cached ones are as good as free: they are given up as others need them.",
        ),
        Panel("Device slots", "short", {"{{instance}} {{state}}": f"hisparse_pd_device_slots{DECODE}"}),
        Panel(
            "KV tokens owed / host slots",
            "percentunit",
            {
                "{{instance}}": f"hisparse_pd_kv_tokens_outstanding{DECODE} / "
                f"sum by (instance, job, component) (hisparse_pd_host_slots{DECODE})"
            },
            "What the requests may come to need, queued ones included. Above 1, some have to wait.",
        ),
        Panel("Prefill pages", "short", {"{{instance}} {{state}}": f"hisparse_pd_prefill_pages{PREFILL}"}),
        Panel(
            "Oldest quarantine",
            "s",
            {"{{instance}}": f"hisparse_pd_quarantine_seconds{DECODE}"},
            "Minutes: a prefill process is gone and its address was not taken again.",
        ),
        Panel(
            "Retractions",
            "short",
            {"{{instance}} {{pool}}": rate("hisparse_pd_retractions_total", DECODE, "instance, pool")},
            "Requests per second that gave their slots up, by the pool that ran out.",
        ),
    ),
    "Prefixes": (
        Panel(
            "Prompt tokens found cached",
            "percentunit",
            {
                f"{{{{instance}}}} {side}": f"{rate('hisparse_pd_prefix_cache_hits_total', selector)} / "
                f"{rate('hisparse_pd_prefix_cache_queries_total', selector)}"
                for side, selector in (("decode", DECODE), ("prefill", PREFILL))
            },
            "Of the prompt tokens that were looked up. What a decode node has is not sent to it; what a prefill node "
            "has, it does not compute.",
        ),
        Panel(
            "Prompt tokens fetched back",
            "short",
            {
                "{{instance}}": rate("hisparse_pd_prefix_fetched_tokens_total", PREFILL),
                "{{instance}} failed: {{reason}}": rate(
                    "hisparse_pd_prefix_fetch_failures_total", PREFILL, "instance, reason"
                ),
            },
            "Tokens per second that were read from decode nodes and not computed; fetches that failed, after which "
            "it computes.",
        ),
        Panel(
            "Host slots for prefixes",
            "percentunit",
            {
                "{{instance}}": "sum by (instance) (hisparse_pd_host_slots"
                + selected("decode", 'state=~"free|cached"')
                + f") / sum by (instance) (hisparse_pd_host_slots{DECODE})"
            },
            "Free or cached: what is left for prefixes of requests that have ended.",
        ),
    ),
    "Swap-in": (
        Panel(
            "Hit rate",
            "percentunit",
            {
                "{{instance}}": f"{rate('hisparse_pd_swap_in_hits_total', DECODE)} / "
                f"({rate('hisparse_pd_swap_in_hits_total', DECODE)} + "
                f"{rate('hisparse_pd_swap_in_misses_total', DECODE)})"
            },
            "Of the selected items, those that were in the hot buffer.",
        ),
        Panel(
            "Fetched from the host",
            "Bps",
            {
                "{{instance}}": rate("hisparse_pd_swap_in_bytes_total", DECODE),
                "{{instance}}, ahead": rate("hisparse_pd_swap_in_ahead_bytes_total", DECODE),
            },
            "ahead: while earlier layers compute, for layers that share a selection. A step waits for all else.",
        ),
        Panel(
            "Waiting for what is copied ahead",
            "percentunit",
            {"{{instance}}": rate("hisparse_pd_swap_in_ahead_wait_seconds_total", DECODE)},
            "Share of the time; the copies that steps do not wait for are hidden.",
        ),
        Panel(
            "Swap-in violations",
            "short",
            {"{{instance}}": f"sum by (instance) (increase(hisparse_pd_swap_in_violations_total{DECODE}{RATE}))"},
            "Each is a bug, and may have been a wrong token.",
        ),
    ),
    "Requests in HBM": (
        Panel(
            "Running requests by where their items are",
            "short",
            {"{{state}}": f"sum by (state) (hisparse_pd_rows{DECODE})"},
            "resident: all in HBM. filling: on the way there. buffered: in a hot buffer, and the rest in host memory.",
            stacked=True,
        ),
        Panel(
            "Hot slots by where the items of their request are",
            "short",
            {"{{state}}": f"sum by (state) (hisparse_pd_hot_slots{DECODE})"},
            "filling: what copies were given.",
            stacked=True,
        ),
        Panel(
            "Copied to make requests resident", "Bps", {"{{instance}}": rate("hisparse_pd_filled_bytes_total", DECODE)}
        ),
        Panel(
            "Requests that become resident, and that cease to be",
            "short",
            {
                "fill ends: {{end}}": rate("hisparse_pd_fills_total", DECODE, "end"),
                "slots given back": f"sum(rate(hisparse_pd_shrunk_rows_total{DECODE}{RATE}))",
            },
            "Per second. left: the request ended or was retracted. reclaimed: others needed the slots. outgrown: it "
            "generates faster than the copy goes.",
        ),
    ),
    "Transfer": (
        Panel("Written to decode nodes", "Bps", {"{{instance}}": rate("hisparse_pd_transfer_bytes_total", PREFILL)}),
        Panel(
            "Time to write a chunk",
            "s",
            quantiles("hisparse_pd_transfer_seconds", PREFILL),
            "Of one prefill chunk.",
        ),
        Panel(
            "Bytes per descriptor",
            "bytes",
            {
                "{{instance}}": f"{rate('hisparse_pd_transfer_bytes_total', PREFILL)} / "
                f"{rate('hisparse_pd_transfer_descriptors_total', PREFILL)}"
            },
            "Small ones are slow over TCP: the destination is fragmented.",
        ),
        Panel(
            "Transfer failures",
            "short",
            {
                "{{instance}} {{reason}}": "sum by (instance, reason) (increase(hisparse_pd_transfer_failures_total"
                + selected("prefill|decode").replace('component="', 'component=~"')
                + f"{RATE}))"
            },
        ),
        Panel(
            "Prefills started again",
            "short",
            {
                "{{instance}}": f"sum by (instance) (increase(hisparse_pd_prefill_retries_total{DECODE}{RATE}))",
            },
            "After a failure, or when a node that leaves handed them back.",
        ),
        Panel(
            "Control messages lost",
            "short",
            {
                f"{{{{instance}}}} {kind}": f"increase(hisparse_pd_control_{kind}"
                + "{"
                + f'{EVERY}, instance=~"$instance"'
                + "}"
                + f"{RATE})"
                for kind in ("malformed", "dropped")
            },
        ),
    ),
}
