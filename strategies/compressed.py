"""Any Flower strategy, fed with compressed client updates."""

import logging
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedsparse.compression import Compressor
from fedsparse.compression.base import check_number, check_whole
from fedsparse.compression.layout import DEFAULT_EXACT, Layout
from fedsparse.errors import AllClientsFailed, ConfigError, unknown_name
from fedsparse.protocol import KEY, MAX_STEPS, WORK_KEY, Directive, views
from fedsparse.protocol import to_record as directive_record
from strategies.accounting import describe, divergence_warning, with_common_metrics
from strategies.aggregation import Mean, Update, averages, like, reply_content, to_record
from strategies.cohort import Clients, CohortGrid, choose, client_order, sample_size, takes_everyone
from strategies.conditions import Conditions
from strategies.inbox import Asked, Asking, first_replies, leave_out_the_late, open_reply, payload_bytes
from strategies.policies import Plan, make_policy
from strategies.report import RoundReport

log = logging.getLogger(__name__)


def _constant_step_size(server_round: int) -> float:
    return 1.0


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
        The compressor of the clients' updates, for example ``"hard_threshold(lam=0.01)|qsgd(levels=16)"``, or a policy
        that changes it from round to round, see `strategies.policies`.
    seed : int
        Seeds cohorts and compressors.
    clients_per_round : int, optional
        Size of the cohort S_t.
    num_clients : int, optional
        Wait for that many clients before the first round.
    min_clients : int, optional
        Wait for that many clients before each round, and go on with those that are there. Default: `num_clients` before
        the first round, `clients_per_round` before the others.
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
    rounds : int, optional
        Rounds of the whole training, for policies that plan ahead; `start` sets it by itself.
    step_size : callable
        Round -> the clients' learning rate (up to a factor), for policies that follow it.
    momentum_correction : float
        Momentum that clients apply to their updates before sparsification (DGC, Lin et al. 2018, Section 3.2); from 0,
        which is none, up to 1. Needs error memory.
    memory_dtype : {"float32", "float16"}
        How clients keep their error memory; see `MemoryStore`.
    max_update_norm : float, optional
        Reject updates whose ``||C(p)||_2`` is larger, so that one client cannot carry the model away. With error memory
        an update carries what earlier ones held back too: leave room for it.
    conditions : Conditions, optional
        Simulated devices on a virtual clock: who is there, and whose update comes too late to be accepted.
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
        min_clients: int | None = None,
        weighting: Literal["num_examples", "uniform"] = "num_examples",
        error_memory: bool = True,
        exact: Sequence[str] = DEFAULT_EXACT,
        frozen: Sequence[str] = (),
        run: str | None = None,
        rounds: int | None = None,
        step_size: Callable[[int], float] = _constant_step_size,
        momentum_correction: float = 0.0,
        memory_dtype: Literal["float32", "float16"] = "float32",
        max_update_norm: float | None = None,
        conditions: Conditions | None = None,
        wait_timeout: float = 600.0,
    ) -> None:
        if not isinstance(inner, Strategy):
            raise ConfigError(f"inner must be a flwr.serverapp.strategy.Strategy, got {type(inner).__name__}.")
        if weighting not in ("num_examples", "uniform"):
            raise unknown_name("weighting", weighting, ["num_examples", "uniform"])
        if memory_dtype not in ("float32", "float16"):
            raise unknown_name("memory_dtype", memory_dtype, ["float32", "float16"])
        counts = {"clients_per_round": clients_per_round, "num_clients": num_clients, "min_clients": min_clients}
        for name, value in (counts | {"rounds": rounds}).items():
            if value is not None:
                check_whole("CompressedStrategy", name, value, 1)
        self.inner, self.policy = inner, make_policy(uplink)
        self.seed, self.clients_per_round, self.num_clients = seed, clients_per_round, num_clients
        self.min_clients, self.weighting, self.error_memory = min_clients, weighting, error_memory
        check_number("CompressedStrategy", "momentum_correction", momentum_correction, 0.0, 1.0)
        if momentum_correction == 1.0:
            raise ConfigError("momentum_correction must be below 1, or the momentum never ends.")
        if not callable(step_size):
            raise ConfigError(f"step_size must be a function from a round to a learning rate, got {step_size!r}.")
        if momentum_correction and not error_memory:
            raise ConfigError("momentum_correction needs error_memory: without it, masked momentum would be lost.")
        self.rounds, self.step_size, self.momentum_correction = rounds, step_size, float(momentum_correction)
        self.exact, self.frozen, self.conditions = tuple(exact), tuple(frozen), conditions
        if max_update_norm is not None:
            check_number("CompressedStrategy", "max_update_norm", max_update_norm, 0.0, float("inf"), open_low=True)
        self.memory_dtype, self.max_update_norm = memory_dtype, max_update_norm
        self.run, self.wait_timeout = run or uuid4().hex, wait_timeout
        self.last_round: RoundReport | None = None
        self._refuse_unsafe()
        self._clients, self._accepted, self._total_error = Clients(), dict[str, int](), 0.0
        self._round: Asking | None = None
        self._there: int | None = None  # clients online when the last round began
        self._warned = False

    def _refuse_unsafe(self) -> None:
        kind = type(self.inner).__name__
        if "Xgb" in kind:
            raise ConfigError(f"{kind} exchanges trees, not a vector of parameters: it cannot be compressed.")
        if "DifferentialPrivacy" in kind and self.error_memory and not self.policy.lossless:
            raise ConfigError(
                f"{kind} with error memory is refused: what a client holds back today it sends later, so one example "
                "influences many rounds and the accounted privacy bound no longer holds. Use error_memory=False."
            )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train as Flower's strategies do; see `flwr.serverapp.strategy.Strategy.start`."""
        self.rounds = self.rounds or num_rounds
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    @property
    def weight_key(self) -> str:
        """The metric by which clients tell their number of examples."""
        return str(getattr(self.inner, "weighted_by_key", "num-examples"))

    # -- training ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort and add each client's directive to the inner strategy's messages."""
        online = self._online(grid)
        there = self.conditions.present(list(online), server_round) if self.conditions else list(online)
        size = self.clients_per_round or sample_size(self.inner, "train", len(there))
        if self.conditions:
            size = self.conditions.cohort_size(size)
        cohort = choose(there, size, self.seed, "cohort", server_round) if size else []
        report = RoundReport(server_round, cohort=cohort)
        base = views(arrays)
        layout = Layout.of(base, self.exact, self.frozen)
        if layout.d == 0 and not layout.exact:
            raise ConfigError("the model has no array that is trained: nothing to do.")
        self.policy.begin(self._plan(server_round, layout, cohort, len(online)))
        names = {online[client]: client for client in cohort}
        with takes_everyone(self.inner):
            view = CohortGrid(grid, list(names))
            messages = list(self.inner.configure_train(server_round, arrays, config, view)) if cohort else []
        messages.sort(key=lambda message: client_order(names[message.metadata.dst_node_id]))
        asked = {}
        for message in messages:
            client = names[message.metadata.dst_node_id]
            compressor = self.policy.compressor(client)
            directive = self._directive(client, server_round, compressor)
            message.content = message.content.copy()  # all messages of a round may share one
            message.content[KEY] = directive
            down_bytes = payload_bytes(message.content)
            report.downlink_bytes += down_bytes
            if self.conditions and (steps := self.conditions.steps(client, down_bytes)) is not None:
                message.content[WORK_KEY] = ConfigRecord({MAX_STEPS: steps})
            asked[message.metadata.dst_node_id] = Asked(client, server_round, compressor, message, down_bytes)
        self._round = Asking(base, layout, asked, report)
        return messages

    def _online(self, grid: Grid) -> dict[str, int]:
        """Wait for clients; where a run begins or goes on, for as many as there are or were, since all connect anew."""
        all_of_them = (self._there or self.num_clients or 0) if self._round is None else 0
        wanted = self.min_clients or max(1, all_of_them, self.clients_per_round or 0)
        online = self._clients.wait_for(grid, wanted, self.wait_timeout)
        self._there = len(online)
        return online

    def _plan(self, server_round: int, layout: Layout, cohort: list[str], online: int) -> Plan:
        exact = sum(entry.dtype.itemsize * prod(entry.shape) for entry in layout.exact)
        conditions, model = self.conditions, layout.dense_bytes
        pace = (lambda client: conditions.pace(client, model)) if conditions else None
        return Plan(server_round, self.rounds, layout.d, cohort, online, exact, self.step_size, pace)

    def _directive(self, client: str, server_round: int, compressor: Compressor) -> ConfigRecord:
        return directive_record(
            Directive(
                run=self.run,
                client=client,
                seed=self.seed,
                server_round=server_round,
                spec=compressor.spec,
                update_id=server_round,
                ack=self._accepted.get(client, -1),
                memory=self.error_memory,
                momentum=self.momentum_correction,
                half=self.memory_dtype == "float16",
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
        received = first_replies(state, replies)
        if self.conditions:
            leave_out_the_late(state, received, self.conditions)
        sparse, uniform = averages(self.inner), self.weighting == "uniform"
        mean, updates, dense = Mean(state.layout), [], []
        for node in state.asked:
            reply, bound = received.pop(node, None), self.max_update_norm
            if (update := open_reply(state, node, reply, self.weight_key, uniform=uniform, max_norm=bound)) is None:
                continue
            updates.append(update)
            if sparse:
                mean.add(update)
            else:
                model = state.layout.apply(state.base, update.compressed.to_dense(), update.exact)
                dense.append(self._reply(state, node, to_record(model), update.metrics, update.weight))
        self._account(state, updates)
        if not updates and self.conditions and report.failed and all(f.in_vain for f in report.failed.values()):
            self.conditions.nobody_came(server_round, self.rounds)
            return None, None
        if not updates:
            client, failure = next(iter(report.failed.items()))
            raise AllClientsFailed(
                f"round {server_round}: all {len(state.asked)} clients failed; the first, client {client}: "
                f"{failure.reason}"
            )
        total = sum(update.weight for update in updates)
        if total == 0.0:
            log.warning("round %d: no client of the cohort has any example; the model stays as it is", server_round)
            return None, None
        metrics = self._metrics(updates)
        if sparse:
            node = next(node for node, asked in state.asked.items() if asked.client == updates[0].client)
            merged = to_record(mean.applied_to(state.base))
            dense = [self._reply(state, node, merged, metrics, total)]
        arrays, inner_metrics = self.inner.aggregate_train(server_round, dense)
        return (like(arrays, state.base) if arrays is not None else None), metrics or inner_metrics

    def _reply(self, state: Asking, node: int, arrays: ArrayRecord, metrics: MetricRecord, weight: float) -> Message:
        key = str(getattr(self.inner, "arrayrecord_key", "arrays"))
        return Message(reply_content(arrays, metrics, self.weight_key, weight, key), reply_to=state.asked[node].message)

    def _metrics(self, updates: list[Update]) -> MetricRecord:
        """Aggregate the clients' metrics as the inner strategy would, weighted like their updates."""
        function = getattr(self.inner, "train_metrics_aggr_fn", aggregate_metricrecords)
        alike = with_common_metrics(updates)
        contents = [RecordDict({"metrics": MetricRecord({**u.metrics, self.weight_key: u.weight})}) for u in alike]
        result: MetricRecord = function(contents, self.weight_key)
        return result

    def _account(self, state: Asking, updates: list[Update]) -> None:
        """Write down what the accepted updates were; from here on they count as accepted."""
        report = state.report
        report.accepted = [update.client for update in updates]
        self._accepted.update({update.client: update.receipt.update_id for update in updates})
        if not updates:
            report.total_error = self._total_error
            self.policy.observe(report, updates)
            return
        if self.conditions:
            self.conditions.empty_rounds = 0
        by_client = {asked.client: asked.compressor for asked in state.asked.values()}
        compressors = [by_client[update.client] for update in updates]
        describe(report, updates, compressors, state.layout)
        self._total_error += float(np.mean([update.receipt.residual_norm**2 for update in updates]))
        report.total_error = self._total_error
        self.policy.observe(report, updates)
        if lost := [update.client for update in updates if update.receipt.memory_reset]:
            log.warning(
                "round %d: the error memory of client %s was damaged or gone and restarted from zero: what had waited "
                "there is lost",
                report.server_round,
                ", ".join(lost),
            )
        if self.error_memory and not self._warned:
            largest = max(update.compressed.nnz for update in updates)
            if (warning := divergence_warning(compressors[0], largest)) is not None:
                self._warned = True
                log.warning(warning)

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
        log.info("\t├──> Compression: %s, error memory %s", self.policy.spec, "on" if self.error_memory else "off")
        self.inner.summary()

    # -- resuming ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what must be stored together with the model so that server and clients agree after a restart."""
        return {
            "run": self.run,
            "accepted": dict(self._accepted),
            "total_error": self._total_error,
            "online": self._there,
            "compressor": self.policy.spec,
            "policy": self.policy.state_dict(),
            "conditions": self.conditions.state_dict() if self.conditions else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`.

        Raises
        ------
        ConfigError
            Where the state is of a strategy with another compressor.
        """
        if (saved := state.get("compressor")) != self.policy.spec:
            raise ConfigError(f"this state was saved with the compressor {saved}; the strategy has {self.policy.spec}.")
        self.run = str(state["run"])
        self._accepted = {str(client): int(update_id) for client, update_id in state["accepted"].items()}
        self._total_error = float(state["total_error"])
        self._there = state.get("online")
        self.policy.load_state_dict(state["policy"])
        if self.conditions and state.get("conditions"):
            self.conditions.load_state_dict(state["conditions"])
