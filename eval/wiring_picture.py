"""The target's layers with the taps on them, as a small inline SVG, and the same in words."""

from __future__ import annotations

from html import escape

from eagle3.wiring import EMBEDDING, Site, Wiring

WIDTH, TOP, BOTTOM, LABEL_GAP = 420, 58, 34, 26
LEFT, RIGHT = 172, 248  # edges of the column of layers


def wiring_words(wiring: Wiring) -> list[str]:
    """One sentence a slot, and one for the teacher."""
    lines = []
    for slot, site in enumerate(wiring.aux):
        if site == EMBEDDING:
            what = "the token embeddings, what enters decoder layer 0 (hidden_states[0] in Transformers)"
        else:
            k = site.layer
            what = f"what enters decoder layer {k}, that is what layer {k - 1} puts out (hidden_states[{k}])"
        lines.append(f"Slot {slot} is {site.words}: {what}.")
    norm = "before" if wiring.teacher == "final" else "after"
    lines.append(f"The teacher is what leaves layer {wiring.num_layers - 1}, {norm} the final norm.")
    return lines


def _spread(wanted: list[float], low: float, high: float) -> list[float]:
    """Move label heights apart to at least LABEL_GAP, keeping their order and staying within the picture."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    floor = low
    for i in order:
        placed[i] = max(wanted[i], floor)
        floor = placed[i] + LABEL_GAP
    roof = high
    for i in reversed(order):
        placed[i] = min(placed[i], roof)
        roof = placed[i] - LABEL_GAP
    return placed


def _entry(site: Site, bottom: float, step: float) -> float:
    """Height at which a site's state enters its layer."""
    return bottom - step * site.layer


def _column(layers: int, bottom: float, step: float, teacher: str) -> list[str]:
    """The layers, the embeddings under them and the teacher above."""
    middle, below = (LEFT + RIGHT) / 2, bottom + 22
    name = escape(teacher.replace("_", " "))
    parts = [
        f'<text class="muted" x="{LEFT - 12}" y="16" text-anchor="end">trained on</text>',
        f'<text class="muted" x="{RIGHT + 12}" y="16">served</text>',
        f'<text x="{middle}" y="{TOP - 24}" text-anchor="middle">{name}, after layer {layers - 1}: teacher</text>',
        f'<path class="teach" d="M{middle} {TOP - 2} V{TOP - 18}"/>',
        f'<text class="muted" x="{middle}" y="{below}" text-anchor="middle">token embeddings, into layer 0</text>',
        f'<path class="teach" d="M{middle} {bottom + 10} V{bottom + 2}"/>',
    ]
    box = f'x="{LEFT}" width="{RIGHT - LEFT}" height="{step - 1.5:.1f}" rx="1.5"'
    parts += [f'<rect class="layer" y="{bottom - step * (k + 1):.1f}" {box}/>' for k in range(layers)]
    return parts


def _taps(wiring: Wiring, other: Wiring, side: int, bottom: float, step: float) -> list[str]:
    """One side's taps (-1 left, 1 right), each led to its slot's label."""
    edge, anchor = (LEFT, "end") if side < 0 else (RIGHT, "start")
    bend, end = edge + side * 16, edge + side * 38
    labels = _spread([_entry(site, bottom, step) for site in wiring.aux], 48, bottom + BOTTOM - 12)
    parts = []
    for slot, (site, label) in enumerate(zip(wiring.aux, labels, strict=True)):
        kind = "tap" if slot < len(other.aux) and other.aux[slot] == site else "tap off"
        y = _entry(site, bottom, step) - 0.75
        name = f"{slot}: {site.name.replace('_', ' ')}"
        parts.append(f'<circle class="{kind}" cx="{edge}" cy="{y:.1f}" r="3.5"/>')
        parts.append(f'<path class="{kind}" d="M{edge} {y:.1f} L{bend} {y:.1f} L{end} {label:.1f}"/>')
        parts.append(
            f'<text class="{kind}" x="{end + side * 5}" y="{label + 4:.1f}" text-anchor="{anchor}">{name}</text>'
        )
    return parts


def wiring_svg(trained: Wiring, served: Wiring) -> str:
    """Layers as a column, layer 0 at the bottom; trained taps on the left, served taps on the right.

    Colours come from the page's classes (`tap`, `off`, `layer`, `muted`), so that it follows light and dark. A tap
    that differs between the sides is of class `off`.
    """
    layers = max(trained.num_layers, served.num_layers)
    step = max(6.0, min(14.0, 330 / layers))
    bottom = TOP + step * layers
    parts = _column(layers, bottom, step, trained.teacher)
    parts += _taps(trained, served, -1, bottom, step) + _taps(served, trained, 1, bottom, step)
    words = escape(f"Trained on {', '.join(trained.names)}; served {', '.join(served.names)}.")
    box = f'viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}"'
    return f'<svg class="wiring" {box} role="img" aria-label="{words}">{"".join(parts)}</svg>'
