"""Looks and behaviour of the report page: light and dark, wide and narrow, mouse, finger and keyboard.

Series have the colours c1 to c8, in this order, and "rest" for what is beyond; both sets were chosen to stay apart
for people who see red and green alike. Words are never in a series' colour.
"""

STYLE = """
:root { --page:#f9f9f7; --card:#ffffff; --ink:#0b0b0b; --quiet:#52514e; --line:#e1e0d9; --axis:#8a8984;
  --c1:#2a78d6; --c2:#eb6834; --c3:#1baf7a; --c4:#eda100; --c5:#e87ba4; --c6:#008300; --c7:#4a3aa7; --c8:#e34948;
  --rest:#8a8984; --bad:#c42b2b; --warn:#8f5a00; --focus:#0b57d0; --on7:#fff; --onrest:#000; }
@media (prefers-color-scheme: dark) { :root { --page:#0d0d0d; --card:#1a1a19; --ink:#ffffff; --quiet:#c3c2b7;
  --line:#2c2c2a; --axis:#898781; --c1:#3987e5; --c2:#d95926; --c3:#199e70; --c4:#c98500; --c5:#d55181; --c6:#008300;
  --c7:#9085e9; --c8:#e66767; --rest:#6f6d68; --bad:#ff8f8f; --warn:#f2c063; --focus:#8ab4f8; --on7:#000;
  --onrest:#fff; } }
* { box-sizing:border-box; }
body { margin:0 auto; max-width:1080px; padding:24px 20px 64px; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; }
h1 { font-size:26px; line-height:1.2; margin:0; letter-spacing:-.01em; }
h2 { font-size:18px; margin:0 0 2px; }
header { margin-bottom:20px; }
.quiet, .says { color:var(--quiet); margin:2px 0 14px; overflow-wrap:anywhere; }
section { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:18px 20px;
  margin:0 0 18px; }
figure { margin:0 0 14px; } figure:last-child { margin-bottom:0; }
.tiles { list-style:none; display:grid; grid-template-columns:repeat(auto-fit,minmax(140px,1fr)); gap:12px;
  margin:0 0 18px; padding:0; }
.tiles li { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:14px 16px; }
.tiles b { display:block; font-size:26px; line-height:1.15; font-weight:600; letter-spacing:-.01em; }
.tiles span { color:var(--quiet); font-size:13px; }
.tiles .bad b { color:var(--bad); } .tiles .warn b { color:var(--warn); }
.legend { list-style:none; display:flex; flex-wrap:wrap; gap:4px 16px; margin:0 0 10px; padding:0; font-size:13px;
  color:var(--quiet); }
.legend .key { width:12px; height:12px; margin-right:6px; vertical-align:-1px; }
svg.chart { display:block; width:100%; overflow:visible; font:12px/1 system-ui,sans-serif; }
svg text { fill:var(--ink); } svg .tick { fill:var(--quiet); } svg .grid { stroke:var(--line); }
svg .base { stroke:var(--axis); }
svg .cell { stroke:var(--card); stroke-width:2; } svg .label { fill:#000; pointer-events:none; }
svg .label.on-c6 { fill:#fff; } svg .label.on-c7 { fill:var(--on7); } svg .label.on-rest { fill:var(--onrest); }
.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}.c5{fill:var(--c5)}.c6{fill:var(--c6)}
.c7{fill:var(--c7)}.c8{fill:var(--c8)}.rest{fill:var(--rest)}.badfill{fill:var(--bad)}.track{fill:var(--line)}
.step{fill:transparent}
[data-tip] { outline:none; } [data-tip]:hover { opacity:.82; }
[data-tip]:focus-visible { stroke:var(--focus); stroke-width:3; opacity:1; }
.bars { font-size:13px; }
.bars .row { display:grid; grid-template-columns:150px 1fr 84px; gap:4px 12px; align-items:center; margin-bottom:8px; }
.bars svg { width:100%; height:20px; display:block; } .bars .name { overflow-wrap:anywhere; }
.bars .value { color:var(--quiet); font-variant-numeric:tabular-nums; text-align:right; }
.lane { font-size:12px; color:var(--quiet); margin:8px 0 2px; overflow-wrap:anywhere; }
details { margin-top:10px; } summary { cursor:pointer; color:var(--quiet); font-size:13px; width:max-content; }
summary:focus-visible, .scroll:focus-visible { outline:3px solid var(--focus); outline-offset:2px; border-radius:4px; }
.scroll { overflow-x:auto; margin-top:8px; max-height:560px; overflow-y:auto; }
table { border-collapse:collapse; width:100%; font-size:13px; }
th, td { text-align:left; padding:5px 14px 5px 0; border-bottom:1px solid var(--line); vertical-align:top; }
th { color:var(--quiet); font-weight:600; white-space:nowrap; position:sticky; top:0; background:var(--card); }
td { white-space:nowrap; max-width:420px; overflow:hidden; text-overflow:ellipsis; }
td.wrap { white-space:normal; min-width:210px; overflow-wrap:anywhere; }
.number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
td svg.data { width:64px; height:10px; margin-right:8px; }
code, .mono { font-family:ui-monospace,SFMono-Regular,Menlo,monospace; font-size:12px; }
.bad { color:var(--bad); }
#tip { position:fixed; z-index:9; max-width:min(360px,90vw); padding:7px 10px; border-radius:8px; font-size:13px;
  background:var(--ink); color:var(--page); pointer-events:none; overflow-wrap:anywhere; white-space:pre-line; }
@media (max-width:600px) { body { padding:16px 12px 48px; font-size:14px; } section { padding:14px; }
  .bars .row { grid-template-columns:1fr max-content; } .bars .bar { grid-row:2; grid-column:1 / -1; }
  h1 { font-size:22px; } svg .label.narrow { display:none; }
  .tiles { grid-template-columns:repeat(2,1fr); } }
@media (prefers-reduced-motion: no-preference) { [data-tip] { transition:opacity .1s; } }
@media print { section { break-inside:avoid; } details { display:block; } }
"""

SCRIPT = """
(() => {
  const tip = document.getElementById("tip");
  const show = (mark, x, y) => {
    tip.textContent = mark.getAttribute("data-tip");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 4)) + "px";
    tip.style.top = (y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 16) + "px";
  };
  const hide = () => { tip.hidden = true; };
  const mark = (event) => event.target.closest && event.target.closest("[data-tip]");
  // One stop of the tab key for each picture; the arrow keys go from mark to mark.
  for (const figure of document.querySelectorAll("figure")) {
    figure.querySelectorAll("[data-tip]").forEach((m, i) => m.setAttribute("tabindex", i ? "-1" : "0"));
  }
  addEventListener("pointermove", (event) => {
    const m = mark(event);
    m ? show(m, event.clientX, event.clientY) : hide();
  });
  const beside = (m) => {
    const box = m.getBoundingClientRect();
    show(m, box.left, Math.min(box.bottom, innerHeight - 60) - 12);
  };
  addEventListener("focusin", (event) => {
    const m = mark(event);
    m ? beside(m) : hide();
  });
  addEventListener("focusout", hide);
  // The keyboard scrolls to what it reaches: words of the mark that has the focus stay with it.
  addEventListener("scroll", () => {
    const m = mark({ target: document.activeElement });
    m && !tip.hidden ? beside(m) : hide();
  }, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const m = mark(event);
    if (!m) return;
    const all = [...m.closest("figure").querySelectorAll("[data-tip]")];
    const next = all[all.indexOf(m) + (event.key === "ArrowRight" ? 1 : -1)];
    if (next) { event.preventDefault(); next.focus(); }
  });
})();
"""
