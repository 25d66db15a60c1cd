"""The look: a theme on Gradio's own, with fonts of the reader's system (nothing is fetched)."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from app.dashboard.page import stylesheet as dashboard_stylesheet
from app.pages.library_page import stylesheet as library_stylesheet

_HERE = Path(__file__).parent


def stylesheet() -> str:
    """The style sheet that goes to `mount_gradio_app(css=…)`."""
    return (_HERE / "style.css").read_text(encoding="utf-8") + dashboard_stylesheet() + library_stylesheet()


def make_theme() -> gr.themes.Base:
    """Teal on slate, calm in light and in dark."""
    teal = gr.themes.Color(
        name="coread",
        c50="#effcf9",
        c100="#d3f6ee",
        c200="#a8ecdf",
        c300="#70dbcb",
        c400="#3cc2b2",
        c500="#1aa597",
        c600="#0f857b",
        c700="#0f766e",
        c800="#115650",
        c900="#134843",
        c950="#042b29",
    )
    sans = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Noto Sans", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
    return gr.themes.Base(
        primary_hue=teal,
        secondary_hue=teal,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_lg,
        font=sans,
        font_mono=mono,
    ).set(
        body_background_fill="#f6f8fa",
        body_background_fill_dark="#0c1218",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#151d26",
        background_fill_secondary="#f1f4f7",
        background_fill_secondary_dark="#1c2530",
        block_background_fill="#ffffff",
        block_background_fill_dark="#151d26",
        block_border_color="#dde3ea",
        block_border_color_dark="#2b3743",
        block_radius="16px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        input_background_fill="#ffffff",
        input_background_fill_dark="#151d26",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_600",
        button_primary_background_fill_dark="#45c9b4",
        button_primary_background_fill_hover_dark="*primary_300",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#10212a",
        button_border_width="1px",
        button_secondary_background_fill="#ffffff",
        button_secondary_background_fill_dark="#151d26",
        button_secondary_background_fill_hover="#f1f4f7",
        button_secondary_background_fill_hover_dark="#1c2530",
        button_secondary_border_color="#dde3ea",
        button_secondary_border_color_dark="#2b3743",
        button_small_padding="6px 12px",
        checkbox_label_background_fill_selected="#e6f5f2",
        checkbox_label_background_fill_selected_dark="#14322f",
        checkbox_label_text_color_selected_dark="#e8eef4",
        color_accent_soft="#e6f5f2",
        color_accent_soft_dark="#14322f",
        shadow_drop="none",
    )
