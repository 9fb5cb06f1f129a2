"""The demo: weigh a model, admit it, let it talk, give every byte back, and show one trace of it all."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.tree import Tree
from weighbridge_proto import targets
from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge.cli.lease_table import print_leases
from weighbridge.cli.load_display import load_line
from weighbridge.cli.tables import print_capacity, print_facts, print_plan
from weighbridge.client import Suite
from weighbridge.demo.checks import (
    check_answer,
    check_given_back,
    check_held,
    check_sums,
    check_trace,
    check_verdict,
)
from weighbridge.demo.model import ensure_demo_model
from weighbridge.demo.otlp_receiver import OtlpReceiver
from weighbridge.demo.trace_tree import Forest, Node, SpanRecord, build_forest
from weighbridge.engine_client import chat_message
from weighbridge.models import model_at
from weighbridge.sizes import format_size
from weighbridge.supervision.services import ServiceSpec
from weighbridge.supervision.suite import RunningSuite
from weighbridge.telemetry import root_span, tracing

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
MAX_ANSWER_TOKENS = 64
WORKLOAD = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=256, slots=1))
"""One slab of MLX's key/value cache (256 tokens), so that a short question holds what the plan reckons with, and the
measured peak can be set beside the planned one."""

ENGINE = "mlx"

OBSERVATION_PATIENCE_S = 10.0
OBSERVATION_PERIOD_S = 0.2

LONGEST_FOLDER = targets.MAX_SOCKET_PATH_BYTES - len("/run/engine-mlx.sock")


class Demo:
    """One run of the demo.

    Args:
        model_folder: where the demo model is, or will be made.
        environ: environment of the services.
        services: what the suite consists of.
        out: where everything is printed.
    """

    def __init__(
        self,
        model_folder: Path,
        environ: dict[str, str],
        services: tuple[ServiceSpec, ...],
        out: Console,
    ) -> None:
        self._model_folder = model_folder.absolute()
        self._environ = environ
        self._services = services
        self._out = out
        self._step = 0
        self.problems: list[str] = []
        """What did not hold, a sentence each."""

    async def run(self) -> None:
        """Do it all. Whatever ends it, no process, lease or socket is left.

        Raises:
            DemoModelError: the model could not be made.
            StartFailedError: a service did not come up.
            CallError: a call failed.
        """
        self._heading("The model")
        if await ensure_demo_model(self._model_folder):
            self._out.print(f"Made it in {self._model_folder}.")
        else:
            self._out.print(f"It is in {self._model_folder}.")
        with OtlpReceiver() as receiver:
            with tracing(receiver.endpoint), _scratch_folder() as folder:
                trace_id = await self._run_suite(folder, receiver.endpoint)
            # The services have stopped and this process has flushed: what was recorded has arrived.
            spans = receiver.spans()
        self._heading("The trace of the request")
        forest = build_forest(spans)
        self._print_forest(forest, trace_id)
        self.problems += check_trace(forest, trace_id)

    async def _run_suite(self, folder: Path, endpoint: str) -> str:
        self._heading("The suite")
        run_dir = folder / "run"
        # What the person's own suite is told must not reach this one.
        environ = {name: value for name, value in self._environ.items() if not name.startswith("WEIGHBRIDGE_")}
        environ |= {
            "WEIGHBRIDGE_OTLP_ENDPOINT": endpoint,
            "WEIGHBRIDGE_LEDGER_DATA_DIR": os.fspath(folder / "ledger"),
            "WEIGHBRIDGE_FIT_MODELS_ROOT": os.fspath(self._model_folder.parent.resolve()),
        }
        async with RunningSuite(self._services, run_dir, environ, self._out.print) as running:
            supervising = asyncio.create_task(running.supervise())
            try:
                async with Suite(running.environ) as suite:
                    return await self._walk(suite, model_at(self._model_folder.resolve()))
            finally:
                supervising.cancel()
                await asyncio.gather(supervising, return_exceptions=True)

    async def _walk(self, suite: Suite, model: weights_pb2.ModelRef) -> str:
        self._heading("What the weights hold")
        print_facts(self._out, (await suite.describe_weights(model)).facts)

        self._heading("Will it run here?")
        plan = await suite.plan_model(model, workload=WORKLOAD)
        print_plan(self._out, plan)
        self.problems += check_sums(plan.requirement) + check_verdict(plan.assessment)

        with root_span("weighbridge demo") as trace_id:
            self._heading("Load")
            engine = await self._load(suite, model)
            self._heading("The lease while it is loaded")
            leases = (await suite.leases()).leases
            print_leases(self._out, leases)
            self.problems += check_held((await suite.capacity()).capacity, leases)
            await self._ask(suite, model)
            self._heading("After the unload")
            await suite.engine(ENGINE).unload()
            capacity = (await suite.capacity()).capacity
            leases = (await suite.leases()).leases
            print_capacity(self._out, capacity)
            print_leases(self._out, leases)
            self._out.print(f"Committed: {capacity.total.committed_bytes} bytes")
            self.problems += check_given_back(capacity, leases)

        self._heading("Planned and measured")
        await self._compare(suite, plan, engine)
        return trace_id

    async def _load(self, suite: Suite, model: weights_pb2.ModelRef) -> engine_service_pb2.Engine:
        engine = engine_service_pb2.Engine()
        last = ""
        async for event in suite.engine(ENGINE).load(model, workload=WORKLOAD):
            line = load_line(event)
            if line and line != last:
                self._out.print(line)
                last = line
            if event.HasField("ready"):
                engine = event.ready.engine
        return engine

    async def _ask(self, suite: Suite, model: weights_pb2.ModelRef) -> None:
        self._heading(QUESTION)
        request = chat_service_pb2.ChatRequest(
            model=model,
            messages=[chat_message(chat_service_pb2.ROLE_USER, QUESTION)],
            sampling=chat_service_pb2.Sampling(temperature=0.0),
            max_output_tokens=MAX_ANSWER_TOKENS,
            workload=WORKLOAD,
        )
        text = ""
        async for event in suite.engine(ENGINE).chat(request):
            if event.HasField("delta"):
                text += event.delta.text
                click.echo(event.delta.text, nl=False)
            elif event.HasField("finished"):
                usage = event.finished.usage
                first_s = usage.time_to_first_token.ToNanoseconds() / 1e9
                click.echo(f"\n({usage.output_tokens} tokens, the first after {first_s:.2f} s)")
        self.problems += check_answer(text, ANSWER)

    async def _compare(
        self, suite: Suite, plan: fit_service_pb2.PlanModelResponse, engine: engine_service_pb2.Engine
    ) -> None:
        observation = await _latest_observation(suite, plan.model_digest)
        if observation is None:
            self.problems.append("The engine recorded no measured peak.")
            return
        planned, measured = observation.planned_bytes, observation.peak_bytes
        took_s = engine.model.load_time.ToNanoseconds() / 1e9
        self._out.print(f"planned peak   {format_size(planned):>12}  {planned:>15,} bytes")
        if measured <= 0 or planned <= 0:
            self.problems.append(f"The recorded peak is {measured} bytes against {planned} planned.")
            return
        off = (planned - measured) / measured
        self._out.print(f"measured peak  {format_size(measured):>12}  {measured:>15,} bytes  (plan {off:+.1%})")
        self._out.print(f"started in     {took_s:>10.1f} s")

    def _print_forest(self, forest: Forest, trace_id: str) -> None:
        request = forest.of_trace(trace_id)
        for root in request.roots:
            self._out.print(render(root))
            services = [span.service for span in root.walk()]
            self._out.print(f"{len(services)} spans, from {', '.join(dict.fromkeys(services))}")
        streams = [node.span for node in forest.roots if trace_id in node.span.linked_trace_ids]
        for span in streams:
            self._out.print(f"linked, a trace of its own: {span.service}  {short_name(span.name)}")
        for node in forest.orphans:
            self._out.print(f"ORPHAN: {node.span.service}  {node.span.name}")
        self._out.print(f"Orphans: {len(forest.orphans)}")

    def _heading(self, text: str) -> None:
        self._step += 1
        self._out.print()
        self._out.print(f"{self._step}. {text}", style="bold")


def render(root: Node) -> Tree:
    """A trace as a tree of lines: service, name, duration, and the status of calls that did not end with OK."""

    def grow(node: Node, add: Callable[[str], Tree]) -> None:
        branch = add(_span_line(node.span))
        for child in node.children:
            grow(child, branch.add)

    tops: list[Tree] = []

    def top(line: str) -> Tree:
        tops.append(Tree(line))
        return tops[0]

    grow(root, top)
    return tops[0]


def _span_line(span: SpanRecord) -> str:
    status = f"  {span.status}" if span.status not in ("", "OK") else ""
    milliseconds = (span.end_ns - span.start_ns) / 1e6
    return f"{span.service.removeprefix('weighbridge-')}  {short_name(span.name)}  {milliseconds:.1f} ms{status}"


def short_name(name: str) -> str:
    """A span's name without its package: ``weighbridge.fit.v1.FitService/PlanModel`` → ``FitService/PlanModel``."""
    service, slash, method = name.rpartition("/")
    return f"{service.rpartition('.')[2]}{slash}{method}"


async def _latest_observation(suite: Suite, model_digest: str) -> lease_pb2.Observation | None:
    # The engine records it beside its release, not before its answer.
    tries = round(OBSERVATION_PATIENCE_S / OBSERVATION_PERIOD_S)
    for _ in range(tries):
        observations = await suite.observations(model_digest=model_digest, limit=1)
        if observations:
            return observations[0]
        await asyncio.sleep(OBSERVATION_PERIOD_S)
    return None


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="wb-"))
    if len(os.fsencode(folder)) > LONGEST_FOLDER:  # a temporary folder deep inside another one
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="wb-", dir="/tmp"))  # mkdtemp makes it private
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
