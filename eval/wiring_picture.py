"""The target's layers with the taps on them, as a small inline SVG, and the same in words."""

from __future__ import annotations

from html import escape

from eagle3.wiring import EMBEDDING, Site, Wiring
from eval.curves import spread

WIDTH, TOP, BOTTOM, LABEL_GAP = 360, 66, 34, 24
LEFT, RIGHT = 154, 206  # edges of the column of layers
BEND, REACH = 8, 20  # from an edge of the column, where a tap's line bends and where it ends


def wiring_words(wiring: Wiring) -> list[str]:
    """One sentence a slot, and one for the teacher."""
    lines = []
    for slot, site in enumerate(wiring.aux):
        lines.append(f"Slot {slot} is {site.words}: {_words(site)}.")
    norm = "before" if wiring.teacher == "final" else "after"
    lines.append(f"The teacher is what leaves layer {wiring.num_layers - 1}, {norm} the final norm.")
    return lines


def _words(site: Site) -> str:
    """What tensor a site is."""
    if site == EMBEDDING:
        return "the token embeddings, what enters decoder layer 0 (hidden_states[0] in Transformers)"
    k = site.layer
    return f"what enters decoder layer {k}, that is what layer {k - 1} puts out (hidden_states[{k}])"


def _entry(site: Site, bottom: float, step: float) -> float:
    """Height at which a site's state enters its layer."""
    return bottom - step * site.layer


def _column(layers: int, bottom: float, step: float, teacher: str) -> list[str]:
    """The layers with some of their numbers, the embeddings under them and the teacher above."""
    middle = (LEFT + RIGHT) / 2
    at = f'x="{middle}" text-anchor="middle"'
    name = escape(teacher.replace("_", " "))
    parts = [
        f'<text class="muted" x="{LEFT - REACH}" y="15" text-anchor="end">trained on</text>',
        f'<text class="muted" x="{RIGHT + REACH}" y="15">served</text>',
        f'<text class="teach" {at} y="{TOP - 26}">teacher: {name}, after layer {layers - 1}</text>',
        f'<circle class="teach" cx="{middle}" cy="{TOP - 2}" r="4"/>',
        f'<path class="teach" d="M{middle} {TOP - 2} v-19"/>',
        f'<text class="muted" {at} y="{bottom + 26}">token embeddings, into layer 0</text>',
        f'<path class="muted" d="M{middle} {bottom + 12} V{bottom + 1}"/>',
    ]
    box = f'x="{LEFT}" width="{RIGHT - LEFT}" height="{step - 1.5:.1f}" rx="1.5"'
    parts += [f'<rect class="layer" y="{bottom - step * (k + 1):.1f}" {box}/>' for k in range(layers)]
    every = 10 if layers > 20 else 5
    return parts + [
        f'<text class="number" {at} y="{bottom - step * (k + 0.5) + 3.5:.1f}">{k}</text>'
        for k in range(0, layers - 1, every)
    ]


def _taps(wiring: Wiring, other: Wiring, side: int, bottom: float, step: float) -> list[str]:
    """One side's taps (-1 left, 1 right), each led to its slot's label."""
    edge, anchor = (LEFT, "end") if side < 0 else (RIGHT, "start")
    bend, end = edge + side * BEND, edge + side * REACH
    labels = spread([_entry(site, bottom, step) for site in wiring.aux], TOP - 4, bottom + BOTTOM - 12, LABEL_GAP)
    parts = []
    for slot, (site, label) in enumerate(zip(wiring.aux, labels, strict=True)):
        same = slot < len(other.aux) and other.aux[slot] == site
        kind = "tap" if same else "tap off"
        y = _entry(site, bottom, step) - 0.75
        told = f"Slot {slot} {'is trained on' if side < 0 else 'is served'} {_words(site)}"
        parts.append(f"<g><title>{escape(told)}{'' if same else ', which differs from the other side'}</title>")
        parts.append(f'<path class="{kind}" d="M{edge} {y:.1f} L{bend} {y:.1f} L{end} {label:.1f}"/>')
        parts.append(f'<circle class="{kind}" cx="{edge}" cy="{y:.1f}" r="4"/>')
        parts.append(
            f'<text class="{kind}" x="{end + side * 4}" y="{label + 4:.1f}" text-anchor="{anchor}">'
            f"slot {slot}: {site.name.replace('_', ' ')}</text></g>"
        )
    return parts


def wiring_svg(trained: Wiring, served: Wiring) -> str:
    """Layers as a column, layer 0 at the bottom; trained taps on the left, served taps on the right.

    Looks come from the page's classes (`tap`, `off`, `teach`, `layer`, `muted`), so that it follows light and dark. A
    tap that differs between the sides is of class `off`, which is told by its dashes as well as by its colour.
    """
    layers = max(trained.num_layers, served.num_layers)
    step = max(6.0, min(14.0, 330 / layers))
    bottom = TOP + step * layers
    parts = _column(layers, bottom, step, trained.teacher)
    parts += _taps(trained, served, -1, bottom, step) + _taps(served, trained, 1, bottom, step)
    words = escape(
        f"The {layers} layers of the target. Trained on {', '.join(trained.names)}; served {', '.join(served.names)}; "
        f"teacher {trained.teacher}."
    )
    box = f'viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}"'
    return f'<svg class="wiring" {box} role="img" aria-label="{words}">{"".join(parts)}</svg>'
