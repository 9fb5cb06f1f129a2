"""Traces as trees, built from spans in whatever order they arrived."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpanRecord:
    """One span as it arrived. Ids are lower-case hex; ``parent_id`` is empty for a root.

    Attributes:
        service: ``service.name`` of the process that sent it.
        status: ``rpc.status_code``, if the span is a call.
        linked_trace_ids: traces that it links to.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    status: str = ""
    linked_trace_ids: tuple[str, ...] = ()


@dataclass
class Node:
    """A span and what it caused, earliest first."""

    span: SpanRecord
    children: list["Node"] = field(default_factory=list)

    def walk(self) -> Iterator[SpanRecord]:
        """Every span of the tree, parents before children."""
        yield self.span
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Forest:
    """What the spans make: trees, and spans whose parent never arrived.

    Attributes:
        roots: one tree for each span without a parent, earliest first.
        orphans: trees whose topmost span names a parent that is not there.
    """

    roots: tuple[Node, ...]
    orphans: tuple[Node, ...]

    def of_trace(self, trace_id: str) -> "Forest":
        """The part that belongs to one trace."""
        return Forest(
            tuple(node for node in self.roots if node.span.trace_id == trace_id),
            tuple(node for node in self.orphans if node.span.trace_id == trace_id),
        )


def build_forest(spans: Iterable[SpanRecord]) -> Forest:
    """Arrange ``spans``. A span that arrived twice (an export that was repeated) counts once.

    Every span is in exactly one tree: spans that name each other as parents in a circle, which no tracer makes, hang
    below an orphan too.
    """
    nodes: dict[tuple[str, str], Node] = {}
    for span in spans:
        nodes.setdefault((span.trace_id, span.span_id), Node(span))
    roots: list[Node] = []
    orphans: list[Node] = []
    for node in nodes.values():
        parent = nodes.get((node.span.trace_id, node.span.parent_id))
        if not node.span.parent_id:
            roots.append(node)
        elif parent is None:
            orphans.append(node)
        else:
            parent.children.append(node)
    seen = {id(node) for top in (*roots, *orphans) for node in _nodes(top)}
    for node in nodes.values():
        if id(node) not in seen:
            _cut_from_parents(node, nodes)
            orphans.append(node)
            seen.update(id(member) for member in _nodes(node))
    for node in nodes.values():
        node.children.sort(key=lambda child: (child.span.start_ns, child.span.span_id))
    return Forest(tuple(sorted(roots, key=_start)), tuple(sorted(orphans, key=_start)))


def _cut_from_parents(node: Node, nodes: dict[tuple[str, str], Node]) -> None:
    parent = nodes[(node.span.trace_id, node.span.parent_id)]
    parent.children = [child for child in parent.children if child is not node]


def _nodes(top: Node) -> Iterator[Node]:
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


def _start(node: Node) -> tuple[int, str]:
    return node.span.start_ns, node.span.span_id
