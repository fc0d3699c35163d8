"""Every metric of every process. A process exports all of them; those that it never sets stay 0."""

from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STAGES = (*_LATENCY, 300, 600)
_PROMPTS = {1024: "to 1K", 8192: "to 8K", 32768: "to 32K", 131072: "to 128K"}
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

TRANSFER_FAILURES = ("prefill", "write", "timeout", "checksum", "verification")
"""Why transfers fail: the prefill node failed or is silent, a write failed, it took too long, what arrived is not what
was sent, or it could not be verified."""

FetchFailure = Literal["refused", "read", "checksum", "timeout"]
"""Why fetches fail: the decode node does not lend, a read failed, what was read is not what the decode node has hashed,
or it took too long."""


class Metrics:
    """The metrics of one process in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "hisparse_pd_"

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(prefix + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(prefix + name, text, labels, buckets=buckets, registry=registry)

        self.host_slots = gauge("host_slots", "Slots of the host KV pool by state.", "state")
        self.device_slots = gauge("device_slots", "Hot-buffer slots by state.", "state")
        self.rows = gauge("rows", "Running requests of a decode node by where their items are.", "state")
        self.hot_slots = gauge(
            "hot_slots", "Hot slots in use by where the items of their request are; filling: of copies.", "state"
        )
        self.filled_bytes = counter("filled_bytes_total", "Bytes that were copied to make requests resident in HBM.")
        self.fills = counter("fills_total", "Fills of requests that were to be resident, by how they ended.", "end")
        self.shrunk_rows = counter("shrunk_rows_total", "Resident requests that gave hot slots back.")
        self.prefill_pages = gauge("prefill_pages", "Pages of the prefill KV pool by state.", "state")
        self.kv_usage = gauge(
            "kv_usage",
            "Part of a node's KV pool that requests hold, 0 to 1; of a gateway: the mean of its decode nodes.",
        )
        self.prompt_tokens_waiting = gauge(
            "prompt_tokens_waiting", "Prompt tokens of a prefill node's requests that are not computed yet."
        )
        self.kv_tokens_outstanding = gauge(
            "kv_tokens_outstanding", "KV tokens that a decode node's requests hold or may come to hold."
        )
        self.quarantine_seconds = gauge(
            "quarantine_seconds", "For how long the oldest quarantined slots have been in quarantine; 0 if none are."
        )
        self.requests = gauge("requests", "Requests that this process holds, by state.", "state")
        self.requests_finished = counter("requests_finished_total", "Requests that ended, by reason.", "reason")
        self.migrations = counter(
            "request_migrations_total",
            "How often requests of a gateway went on at another decode node, as their own had failed.",
        )
        self.retractions = counter(
            "retractions_total",
            "Requests that lost their slots and resumed later, by the pool that ran out.",
            "pool",
        )
        self.prefix_cache_queries = counter(
            "prefix_cache_queries_total", "Tokens of prompts that were looked up in a prefix cache.", "side"
        )
        self.prefix_cache_hits = counter(
            "prefix_cache_hits_total",
            "Of these, tokens whose KV was there: it was not sent to a decode node, or not computed by a prefill node.",
            "side",
        )
        self.prefix_fetched_tokens = counter(
            "prefix_fetched_tokens_total", "Prompt tokens whose KV was fetched from the decode node, not computed."
        )
        self.prefix_fetched_bytes = counter("prefix_fetched_bytes_total", "Bytes read from decode nodes.")
        self.prefix_fetch_seconds = histogram(
            "prefix_fetch_seconds", "Time to fetch a prefix, from the request to verified bytes.", _LATENCY
        )
        self.prefix_fetch_failures = counter(
            "prefix_fetch_failures_total", "Failed fetches of prefixes, which were computed instead.", "reason"
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens computed.")
        self.generated_tokens = counter("generated_tokens_total", "Tokens generated.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens_total", "Drafted tokens that a step verified.")
        self.accepted_draft_tokens = counter(
            "spec_decode_num_accepted_tokens_total", "Of these, tokens that were what would have been drawn without."
        )
        self.swap_in_hits = counter("swap_in_hits_total", "Selected items that were in the hot buffer.")
        self.swap_in_misses = counter("swap_in_misses_total", "Selected items fetched from the host pool.")
        self.swap_in_bytes = counter("swap_in_bytes_total", "Bytes fetched from the host pool into hot buffers.")
        self.swap_in_ahead_bytes = counter(
            "swap_in_ahead_bytes_total", "Those of swap_in_bytes_total that are copied while earlier layers compute."
        )
        self.swap_in_ahead_wait = counter(
            "swap_in_ahead_wait_seconds_total",
            "Time that steps waited for what is copied ahead, estimated from one group of layers.",
        )
        self.swap_in_violations = counter(
            "swap_in_violations_total", "Selected items that swap-in could not serve: a bug, and wrong tokens."
        )
        self.transfer_bytes = counter("transfer_bytes_total", "Bytes written to decode nodes.")
        self.transfer_descriptors = counter("transfer_descriptors_total", "Transfer descriptors posted.")
        self.transfer_seconds = histogram("transfer_seconds", "Time to write one prefill chunk.", _LATENCY)
        self.transfer_failures = counter("transfer_failures_total", "Failed transfers, by reason.", "reason")
        self.prefill_retries = counter("prefill_retries_total", "Prefills started again on a new epoch.")
        self.stage_seconds = histogram(
            "stage_seconds",
            "What a request spent in each stage before its first token, by length of its prompt in tokens.",
            _STAGES,
            "stage",
            "prompt",
        )
        self.loop_delay = histogram(
            "loop_delay_seconds",
            "How late timers of a gateway's event loop run: how long work for one request holds up all others.",
            _LATENCY,
        )
        self.ttft = histogram("ttft_seconds", "Time from arrival of a request to its first token.", _LATENCY)
        self.inter_token = histogram("inter_token_seconds", "Time between tokens of one request.", _LATENCY)
        self.decode_batch_size = histogram("decode_batch_size", "Requests in a decode step.", _SIZES)
        self.control_malformed = gauge("control_malformed", "Control frames dropped as malformed since the start.")
        self.control_dropped = gauge(
            "control_dropped", "Control messages dropped since the start, as too many waited here or for a peer."
        )
        self.http_refused = counter(
            "http_refused_total", "HTTP requests and connections refused before they were served, by reason.", "reason"
        )
        self.http_requests = counter(
            "http_requests_total",
            "HTTP requests that a gateway answered, by route and status; 499: the client left before.",
            "endpoint",
            "status",
        )
        self.client_requests = counter(
            "client_requests_total", "Requests that a gateway took of clients, by the name of their key.", "client"
        )
        self.client_tokens = counter(
            "client_tokens_total",
            "Tokens of clients' requests, by the name of their key: prompt, cached (of these), generated.",
            "client",
            "kind",
        )
        self.answer_bytes = gauge("answer_bytes", "Bytes of answers that a gateway holds.")
        self.answers_ended = counter(
            "answers_ended_total", "Requests that ended as their answers, or all answers, held too much.", "reason"
        )
        self.conversations_forgotten = counter(
            "conversations_forgotten_total",
            "Conversations of WebSockets that were not kept for want of room.",
            "reason",
        )
        self.control_refused = gauge(
            "control_refused", "Connections and messages refused on the control port since the start.", "reason"
        )
        self.nodes = gauge("nodes", "Registered nodes by role, as the gateway sees them.", "role")
        # From 0: Prometheus sees no increase from a missing series to 1, and one of these is worth an alert.
        for reason in TRANSFER_FAILURES:
            self.transfer_failures.labels(reason)
        for reason in get_args(FetchFailure):
            self.prefix_fetch_failures.labels(reason)
        for pool in ("device", "host"):
            self.retractions.labels(pool)
        self.requests_finished.labels("queue_full")
        for side in ("decode", "prefill"):
            self.prefix_cache_queries.labels(side)
            self.prefix_cache_hits.labels(side)

    def note_stages(self, prompt_tokens: int, **seconds: float) -> None:
        """Count the time that a request has spent in stages, once it has left them. They are, in order:

        queue: at the decode node, for host slots and a prefill node. prefill_queue, prefill, transfer: at the prefill
        node, until it begins with the prompt, until all is computed or found, until the rest is written. admission: at
        the decode node, for a hot buffer. first_step: until its first token.
        """
        prompt = next((name for most, name in _PROMPTS.items() if prompt_tokens <= most), "above 128K")
        for stage, spent in seconds.items():
            self.stage_seconds.labels(stage, prompt).observe(spent)

    def note_control(self, malformed: int, dropped: int, refused: Mapping[str, int]) -> None:
        """Set what the control plane has counted, before a scrape."""
        self.control_malformed.set(malformed)
        self.control_dropped.set(dropped)
        for reason, number in refused.items():
            self.control_refused.labels(reason).set(number)

    def render(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self.registry)
