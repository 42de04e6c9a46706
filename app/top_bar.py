"""The line at the top of the window: what is loaded, the menus, the scheduler's knobs, and the gauges that tell how the
engine does."""

from __future__ import annotations

import time
from collections.abc import Collection

from PySide6.QtCore import QEvent, QRect, QRectF, QSize, Qt, QTimer
from PySide6.QtGui import QFontMetrics, QHideEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QMenu, QSizePolicy, QToolButton, QWidget

from app.notices import LoadingNotice
from app.scheduler_bar import SchedulerBar
from app.scope.panel import ScopeSource
from app.theme import PADDING, SPACING, Theme
from app.translation import tr
from app.widgets import Figure, Gauge, label, paint_surface
from app.words import seconds_label
from engine.messages import ModelInfo

MODEL_NAME_PIXELS = 190
GAUGE_SECONDS = 0.25
"""How often rates and percentiles change at most: figures that never rest cannot be read."""


class GaugeRow(QWidget):
    """Gauges at the right end. Where there is no room for all, the most wanted ones have it."""

    BETWEEN = SPACING + 6

    def __init__(self, items: list[QWidget], most_wanted: list[QWidget]) -> None:
        """The same items twice: from left to right, and the most wanted first."""
        super().__init__()
        self._items = items
        self._most_wanted = most_wanted
        for item in items:
            item.setParent(self)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)

    def minimumSizeHint(self) -> QSize:
        return QSize(0, max(item.sizeHint().height() for item in self._items))

    def sizeHint(self) -> QSize:
        return QSize(self._width(self._items), self.minimumSizeHint().height())

    def _width(self, shown: Collection[QWidget]) -> int:
        return sum(item.sizeHint().width() + self.BETWEEN for item in shown) - self.BETWEEN

    def _arrange(self) -> None:
        shown: set[QWidget] = set()
        for item in self._most_wanted:
            silent = isinstance(item, Figure) and not item.text()
            if not silent and self._width({*shown, item}) <= self.width():
                shown.add(item)
        x = self.width() - self._width(shown)
        for item in self._items:
            item.setVisible(item in shown)
            if item in shown:
                size = item.sizeHint()
                item.setGeometry(QRect(x, (self.height() - size.height()) // 2, size.width(), size.height()))
                x += size.width() + self.BETWEEN

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.LayoutRequest:
            self._arrange()
        return super().event(event)


class TopBar(QWidget):
    def __init__(self, theme: Theme, source: ScopeSource, model_menu: QMenu, view_menu: QMenu) -> None:
        super().__init__()
        self._theme = theme
        self._source = source
        self._changed_at = 0.0
        self._due = QTimer(self)
        self._due.setSingleShot(True)
        self._due.timeout.connect(self._refresh_rates)
        self.model_button = _menu_button(tr("No model"), model_menu, tr("Model menu"))
        self.view_button = _menu_button(tr("View"), view_menu, tr("View menu"))
        self.running = Gauge(tr("running"), tr("Requests in the batch"))
        self.waiting = Gauge(tr("waiting"), tr("Requests in the queue, preempted ones included"))
        self.kv = Gauge("KV", tr("Share of the KV blocks that requests refer to"))
        self.preempted = Gauge(tr("preempted"), tr("Preemptions since the engine started"))
        self.output = Gauge(
            tr("output"), tr("Output tokens per second, the mean over the steps of the last two seconds")
        )
        self.ttft = Gauge("TTFT p50", tr("Median time from arrival to first token, of the last minute"))
        self.scheduler = SchedulerBar()
        self.pending = Figure("muted")
        """That a discipline takes over, and when."""
        self.loading = LoadingNotice()
        gauges = [self.running, self.waiting, self.kv, self.preempted, self.output, self.ttft]
        most_wanted = [self.running, self.waiting, self.kv, self.output, self.pending, self.preempted, self.ttft]
        self.gauges = GaugeRow([self.pending, *gauges], most_wanted)
        self.alive = False
        """Whether there is an engine of which the gauges could tell."""
        row = QHBoxLayout(self)
        row.setContentsMargins(PADDING[0], 7, PADDING[2], 7)
        row.setSpacing(SPACING)
        row.addWidget(label("Batchscope", "title"))
        row.addSpacing(4)
        row.addWidget(self.model_button)
        row.addWidget(self.view_button)
        row.addWidget(self.scheduler)
        row.addWidget(self.gauges, 1)
        row.addWidget(self.loading, 1)
        theme.changed.connect(self.update)
        self.refresh()

    def paintEvent(self, event: QPaintEvent) -> None:
        paint_surface(QPainter(self), QRectF(self.rect()), self._theme.card, self._theme.line)

    def show_model(self, info: ModelInfo | None, name: str = tr("No model")) -> None:
        """What is loaded, or ``name`` where nothing is."""
        if info is not None:
            device = "CPU" if info.device == "cpu" else info.device.upper()
            self.model_button.setToolTip(_model_sentence(info))
            self.model_button.setText(f"{self._elided(info.name)} · {info.dtype} · {device} ▾")
        else:
            self.model_button.setToolTip(name)
            self.model_button.setText(f"{self._elided(name)} ▾")

    def show_state(self, state: str) -> None:
        """The engine's state: what loads has no gauges, what is gone has no figures."""
        loading = state in ("starting", "loading")
        if state == "starting":
            self.loading.begin()
        self.loading.setVisible(loading)
        self.gauges.setVisible(not loading)
        self.alive = state == "ready"
        self.refresh()

    def _elided(self, name: str) -> str:
        metrics = QFontMetrics(self.font())
        return metrics.elidedText(name, Qt.TextElideMode.ElideMiddle, MODEL_NAME_PIXELS)

    def run_moved(self) -> None:
        self._refresh_counts()
        if time.perf_counter() - self._changed_at >= GAUGE_SECONDS or self._source.idle:
            self._refresh_rates()
        else:  # with one of the next steps; without one if there should be none
            self._due.start(round(1000 * 2 * GAUGE_SECONDS))

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._due.stop()

    def refresh(self) -> None:
        self._refresh_counts()
        self._refresh_rates()

    @property
    def _is_known(self) -> bool:
        """Whether there are figures: of the engine that runs, or of the moment that is looked back at."""
        return self.alive or self._source.moment is not None

    def _refresh_counts(self) -> None:
        state = self._source.state
        known = self._is_known
        self.running.set_text(f"{state.num_running:,}" if known else "–")
        self.waiting.set_text(f"{state.num_waiting:,}" if known else "–")
        self.kv.set_text(_share(state.kv_usage) if known else "–")
        self.preempted.set_text(f"{state.totals.preemptions:,}" if known else "–")
        self.scheduler.refresh(state, self._source.scheduler, alive=self.alive)
        after = state.pending_discipline if known else ""
        self.pending.say(tr("→ {after} when the batch has drained", after=after) if after else "")

    def _refresh_rates(self) -> None:
        self._due.stop()
        self._changed_at = time.perf_counter()
        known, source = self._is_known, self._source
        then = None if source.moment is None else source.now
        output = 0.0 if source.idle else source.history.rates.rate("output", then)
        self.output.set_text(f"{output:,.0f} tok/s" if known else "–")
        self.ttft.set_text(seconds_label(source.history.latency.recent_ttft(then).p50) if known else "–")


def _share(usage: float) -> str:
    """A share of the pool in percent; what is in use at all is never called 0."""
    return "<1 %" if 0 < usage < 0.01 else f"{100 * usage:.0f} %"


def _menu_button(text: str, menu: QMenu, accessible: str) -> QToolButton:
    result = QToolButton()
    result.setText(f"{text} ▾")
    result.setMenu(menu)
    result.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
    result.setAccessibleName(accessible)
    result.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    return result


def _model_sentence(info: ModelInfo) -> str:
    return "\n".join(
        (
            tr(
                "{name}: {architecture}, {parameters:,.0f} million parameters",
                name=info.name,
                architecture=info.architecture,
                parameters=info.parameters / 1000000.0,
            ),
            tr(
                "{weight_bytes:,.0f} MiB of weights in {dtype}, {device}, {threads} threads",
                weight_bytes=info.weight_bytes / 2**20,
                dtype=info.dtype,
                device=info.device,
                threads=info.threads,
            ),
            tr("backend {backend}: {backend_reason}", backend=info.backend, backend_reason=info.backend_reason),
            tr(
                "KV cache: {num_blocks:,} blocks of {block_size} tokens, {size:,.0f} MiB in {kv_dtype}",
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                size=info.num_blocks * info.kv_bytes_per_block / 2**20,
                kv_dtype=info.kv_dtype,
            ),
            tr(
                "context up to {max_model_len:,} tokens, {token_budget:,} tokens a step, "
                "{max_num_seqs:,} requests at once",
                max_model_len=info.max_model_len,
                token_budget=info.token_budget,
                max_num_seqs=info.max_num_seqs,
            ),
            tr("loaded in {load_seconds:.1f} s", load_seconds=info.load_seconds),
        )
    )
