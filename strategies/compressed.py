"""Any Flower strategy, fed with compressed client updates."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from numpy.typing import NDArray

from fedsparse.compression import Compressor, decode
from fedsparse.compression.base import check_whole
from fedsparse.compression.layout import DEFAULT_EXACT, Layout
from fedsparse.errors import AllClientsFailed, ConfigError, PayloadError, unknown_name
from fedsparse.protocol import (
    KEY,
    Directive,
    Receipt,
    from_record,
    number_metric,
    only,
    unpack_arrays,
    views,
)
from fedsparse.protocol import (
    to_record as directive_record,
)
from strategies.aggregation import Mean, Update, averages, like, reply_content, to_record
from strategies.cohort import Clients, CohortGrid, choose, client_order, sample_size, takes_everyone
from strategies.report import RoundReport

log = logging.getLogger(__name__)


@dataclass
class _Round:
    """What the server must remember between asking a cohort and aggregating its replies."""

    base: dict[str, NDArray[np.generic]]
    layout: Layout
    compressor: Compressor
    asked: dict[int, tuple[str, int, Message]]  # node id -> client, update id, the message sent
    report: RoundReport


class CompressedStrategy(Strategy):
    """Wrap a Flower strategy so that its clients send compressed updates with error memory.

    The clients' app needs `clients.CompressionMod` first in its mods. Averaging strategies (FedAvg, FedProx, FedAvgM,
    FedAdam, FedYogi, FedAdagrad and their like) get the weighted mean of the sparse updates as one reply; all others
    (Krum, Bulyan, FedMedian, FedTrimmedAvg, ...) get every client's decoded model.

    Parameters
    ----------
    inner : flwr.serverapp.strategy.Strategy
        The strategy that aggregates. Its settings for sampling say how many clients train and evaluate where
        `clients_per_round` is not given; which ones is chosen here, seeded.
    uplink : str
        The compressor of the clients' updates, for example ``"hard_threshold(lam=0.01)|qsgd(levels=16)"``.
    seed : int
        Seeds cohorts and compressors.
    clients_per_round : int, optional
        Size of the cohort S_t.
    num_clients : int, optional
        Wait for that many clients before the first round.
    weighting : {"num_examples", "uniform"}
        Weight of an update: the client's examples (McMahan et al. 2017), or 1/R for each (as in the three papers).
    error_memory : bool
        Whether clients remember what they did not send (Stich et al. 2018).
    exact : sequence of str
        Patterns of float arrays that travel uncompressed; default: running statistics of normalisation layers.
    frozen : sequence of str
        Arrays that are not trained, so never sent.
    run : str, optional
        Names the clients' error memories; a new name for every training, the same one to resume it. Default: random.
    wait_timeout : float
        Seconds to wait for clients.

    Raises
    ------
    ConfigError
        Unknown compressor, impossible numbers, or a combination that would be wrong: differential privacy together
        with error memory, tree ensembles.
    """

    def __init__(
        self,
        inner: Strategy,
        uplink: str = "topk(density=0.01)",
        *,
        seed: int = 0,
        clients_per_round: int | None = None,
        num_clients: int | None = None,
        weighting: Literal["num_examples", "uniform"] = "num_examples",
        error_memory: bool = True,
        exact: Sequence[str] = DEFAULT_EXACT,
        frozen: Sequence[str] = (),
        run: str | None = None,
        wait_timeout: float = 600.0,
    ) -> None:
        if not isinstance(inner, Strategy):
            raise ConfigError(f"inner must be a flwr.serverapp.strategy.Strategy, got {type(inner).__name__}.")
        if weighting not in ("num_examples", "uniform"):
            raise unknown_name("weighting", weighting, ["num_examples", "uniform"])
        for name, value in (("clients_per_round", clients_per_round), ("num_clients", num_clients)):
            if value is not None:
                check_whole("CompressedStrategy", name, value, 1)
        self.inner, self.compressor = inner, Compressor.from_spec(uplink)
        self.seed, self.clients_per_round, self.num_clients = seed, clients_per_round, num_clients
        self.weighting, self.error_memory = weighting, error_memory
        self.exact, self.frozen = tuple(exact), tuple(frozen)
        self.run, self.wait_timeout = run or uuid4().hex, wait_timeout
        self.last_round: RoundReport | None = None
        self._refuse_unsafe()
        self._clients, self._accepted, self._total_error = Clients(), dict[str, int](), 0.0
        self._round: _Round | None = None
        self._warned = False

    def _refuse_unsafe(self) -> None:
        kind = type(self.inner).__name__
        if "Xgb" in kind:
            raise ConfigError(f"{kind} exchanges trees, not a vector of parameters: it cannot be compressed.")
        if "DifferentialPrivacy" in kind and self.error_memory and not self.compressor.lossless:
            raise ConfigError(
                f"{kind} with error memory is refused: what a client holds back today it sends later, so one example "
                "influences many rounds and the accounted privacy bound no longer holds. Use error_memory=False."
            )

    @property
    def weight_key(self) -> str:
        """The metric by which clients tell their number of examples."""
        return str(getattr(self.inner, "weighted_by_key", "num-examples"))

    # -- training ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and add each client's directive to the inner strategy's messages."""
        online = self._online(grid, server_round)
        size = self.clients_per_round or sample_size(self.inner, "train", len(online))
        cohort = choose(online, size, self.seed, "cohort", server_round) if size else []
        report = RoundReport(server_round, cohort=cohort)
        base = views(arrays)
        layout = Layout.of(base, self.exact, self.frozen)
        if layout.d == 0 and not layout.exact:
            raise ConfigError("the model has no array that is trained: nothing to do.")
        names = {online[client]: client for client in cohort}
        with takes_everyone(self.inner):
            view = CohortGrid(grid, list(names))
            messages = list(self.inner.configure_train(server_round, arrays, config, view)) if cohort else []
        messages.sort(key=lambda message: client_order(names[message.metadata.dst_node_id]))
        asked = {}
        for message in messages:
            client = names[message.metadata.dst_node_id]
            message.content = RecordDict({**message.content, KEY: self._directive(client, server_round)})
            report.downlink_bytes += _payload_bytes(message.content)
            asked[message.metadata.dst_node_id] = (client, server_round, message)
        self._round = _Round(base, layout, self.compressor, asked, report)
        return messages

    def _online(self, grid: Grid, server_round: int) -> dict[str, int]:
        first = self._round is None
        wanted = max(1, (self.num_clients or 0) if first else 0, self.clients_per_round or 0)
        return self._clients.wait_for(grid, wanted, self.wait_timeout)

    def _directive(self, client: str, server_round: int) -> ConfigRecord:
        return directive_record(
            Directive(
                run=self.run,
                client=client,
                seed=self.seed,
                server_round=server_round,
                spec=self.compressor.spec,
                update_id=server_round,
                ack=self._accepted.get(client, -1),
                memory=self.error_memory,
                exact="\n".join(self.exact),
                frozen="\n".join(self.frozen),
            )
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode in client order, add up, and let the inner strategy aggregate.

        Raises
        ------
        AllClientsFailed
            Where a cohort was asked and nobody gave a usable update.
        """
        state = self._round
        if state is None or state.report.server_round != server_round:
            raise RuntimeError("aggregate_train must follow configure_train of the same round")
        report = self.last_round = state.report
        if not state.asked:
            return None, None
        received = self._sort(state, replies)
        sparse = averages(self.inner)
        mean, updates, dense = Mean(state.layout), [], []
        for node in state.asked:
            if (update := self._open(state, node, received.pop(node, None))) is None:
                continue
            updates.append(update)
            if sparse:
                mean.add(update)
            else:
                model = state.layout.apply(state.base, update.compressed.to_dense(), update.exact)
                dense.append(self._reply(state, node, to_record(model), update.metrics, update.weight))
        self._account(state, updates)
        if not updates:
            first = next(iter(report.failed.items()))
            raise AllClientsFailed(
                f"round {server_round}: all {len(state.asked)} clients failed; the first, client {first[0]}: {first[1]}"
            )
        total = sum(update.weight for update in updates)
        if total == 0.0:
            log.warning("round %d: no client of the cohort has any example; the model stays as it is", server_round)
            return None, None
        metrics = self._metrics(updates)
        if sparse:
            node = next(node for node, (client, _, _) in state.asked.items() if client == updates[0].client)
            merged = to_record(mean.applied_to(state.base))
            dense = [self._reply(state, node, merged, metrics, total)]
        arrays, inner_metrics = self.inner.aggregate_train(server_round, dense)
        return (like(arrays, state.base) if arrays is not None else None), metrics or inner_metrics

    def _sort(self, state: _Round, replies: Iterable[Message]) -> dict[int, Message]:
        """Keep the first reply of each node that was asked; late and foreign ones are counted in the log only."""
        received: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if node in state.asked and node not in received:
                received[node] = reply
            else:
                log.warning("round %d: ignored a second or unasked reply of node %d", state.report.server_round, node)
        return received

    def _open(self, state: _Round, node: int, reply: Message | None) -> Update | None:
        """Decode one reply; what is wrong with it goes into the report."""
        client, update_id, _ = state.asked[node]
        report = state.report
        if reply is None:
            report.failed[client] = "no reply in time"
        elif reply.has_error():
            report.failed[client] = f"error {reply.error.code}: {_last_line(reply.error.reason or '')}"
        else:
            try:
                return self._decode(state, client, update_id, reply.content)
            except PayloadError as error:
                report.failed[client] = f"rejected: {error}"
        return None

    def _decode(self, state: _Round, client: str, update_id: int, content: RecordDict) -> Update:
        state.report.uplink_bytes += _payload_bytes(content)
        frame, exact = unpack_arrays(only(content.array_records, "ArrayRecord"))
        metrics = only(content.metric_records, "MetricRecord")
        receipt = from_record(Receipt, content.config_records.get(KEY, ConfigRecord()))
        examples = number_metric(metrics, self.weight_key)
        if examples < 0:
            raise PayloadError(f"the reply's metric {self.weight_key!r} is negative: {examples}.")
        layout = state.layout
        update = decode(frame, state.compressor, layout.d, bounds=layout.bounds, update_id=update_id)
        weight = examples if self.weighting == "num_examples" else 1.0
        return Update(client, update, layout.unpack_exact(exact), receipt, metrics, weight)

    def _reply(self, state: _Round, node: int, arrays: ArrayRecord, metrics: MetricRecord, weight: float) -> Message:
        key = str(getattr(self.inner, "arrayrecord_key", "arrays"))
        return Message(reply_content(arrays, metrics, self.weight_key, weight, key), reply_to=state.asked[node][2])

    def _metrics(self, updates: list[Update]) -> MetricRecord:
        """Aggregate the clients' metrics as the inner strategy would, weighted like their updates."""
        function = getattr(self.inner, "train_metrics_aggr_fn", aggregate_metricrecords)
        contents = [RecordDict({"metrics": MetricRecord({**u.metrics, self.weight_key: u.weight})}) for u in updates]
        result: MetricRecord = function(contents, self.weight_key)
        return result

    def _account(self, state: _Round, updates: list[Update]) -> None:
        """Write down what the accepted updates were; from here on they count as accepted."""
        report, layout, compressor = state.report, state.layout, state.compressor
        report.accepted = [update.client for update in updates]
        self._accepted.update({update.client: update.receipt.update_id for update in updates})
        if not updates:
            return
        norms = [update.receipt.residual_norm for update in updates]
        self._total_error += float(np.mean(np.square(norms)))
        counts = [update.compressed.nnz for update in updates]
        pieces = len(layout.compressed)
        report.nnz = sum(counts)
        report.density = float(np.mean(counts)) / layout.d if layout.d else None
        report.uplink_frame_bits_formula = sum(compressor.formula_bits(layout.d, n, pieces) for n in counts)
        report.dense_bytes = len(updates) * layout.dense_bytes
        report.lam = getattr(compressor.sparsifier, "lam", None)
        report.residual_norm, report.residual_norm_max = float(np.mean(norms)), max(norms)
        report.total_error = self._total_error
        report.update_norm = float(np.mean([update.receipt.update_norm for update in updates]))
        self._warn_of_divergence(max(counts))
        report.memory_resets = sum(update.receipt.memory_reset for update in updates)
        report.restored = sum(update.receipt.restored for update in updates)
        losses = [(u.weight, u.metrics.get("train-loss")) for u in updates]
        known = [(w, float(x)) for w, x in losses if isinstance(x, int | float) and np.isfinite(x)]
        weight = sum(w for w, _ in known)
        report.train_loss = sum(w * x for w, x in known) / weight if weight else None

    def _warn_of_divergence(self, kept: int) -> None:
        """Say once that a quantizer is no contraction on as many values as are really kept."""
        quantizer = self.compressor.quantizer
        # Of the other quantizers the bound is far from what really happens; of this one it is close.
        if self._warned or not self.error_memory or self.compressor.piecewise or getattr(quantizer, "norm", "") != "l2":
            return
        beta = quantizer.claim(kept).relative
        if beta < 1.0:
            return
        self._warned = True
        log.warning(
            "%s of %d kept values has a relative error of %.2f >= 1: it is no contraction, the error memory can grow "
            'without bound and training diverge (Basu et al. 2019, Lemma 1). Use qsgd(..., norm="max"), '
            "qsgd(..., scaled=true), more levels, or piecewise(...).",
            quantizer.name,
            kept,
            beta,
        )

    # -- evaluation --------------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy evaluate on a seeded choice of clients."""
        online = self._clients.online(grid)
        size = sample_size(self.inner, "evaluate", len(online))
        if size == 0:
            return []
        cohort = choose(online, size, self.seed, "evaluate", server_round)
        names = {online[client]: client for client in cohort}
        with takes_everyone(self.inner):
            view = CohortGrid(grid, list(names))
            messages = list(self.inner.configure_evaluate(server_round, arrays, config, view))
        return sorted(messages, key=lambda message: client_order(names[message.metadata.dst_node_id]))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pass on, in an order that does not depend on who was fastest."""
        ordered = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        return self.inner.aggregate_evaluate(server_round, ordered)

    def summary(self) -> None:
        """Log the settings of both strategies."""
        log.info("\t├──> Compression: %s, error memory %s", self.compressor, "on" if self.error_memory else "off")
        self.inner.summary()

    # -- resuming ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what must be stored together with the model so that server and clients agree after a restart."""
        return {"run": self.run, "accepted": dict(self._accepted), "total_error": self._total_error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.run = str(state["run"])
        self._accepted = {str(client): int(update_id) for client, update_id in state["accepted"].items()}
        self._total_error = float(state["total_error"])


def _last_line(reason: str) -> str:
    """Return what a reason says in the end: Flower's engine gives Ray's whole coloured traceback."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", reason)
    return next((line.strip() for line in reversed(plain.splitlines()) if line.strip()), "no reason given")


def _payload_bytes(content: RecordDict) -> int:
    """Count the serialized arrays of a message: what grows with the model."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
