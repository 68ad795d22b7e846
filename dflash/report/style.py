"""The page's style: one column on a phone, two or three side by side on a desk; light and dark as the system is."""

STYLE = """
:root { --back: #fbfbf9; --box: #ffffff; --ink: #1d2330; --soft: #667085; --rule: #e4e4de; --accent: #2456c8;
  --c0: #2456c8; --c1: #d4552a; --c2: #16876a; --c3: #8b3fb5; --c4: #b07d00; --c5: #5a6472;
  --k0: #4c78c8; --k1: #d4703f; --k2: #2e9c7c; --k3: #a05cc4; --k4: #c79a1e; --k5: #c8476b;
  --k6: #5f9fb0; --k7: #8a93a0; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171c; --box: #1b1f26; --ink: #e6e8ec; --soft: #98a2b3; --rule: #2d333d; --accent: #86aaff;
    --c0: #86aaff; --c1: #ff9a70; --c2: #57d0a8; --c3: #cf97ee; --c4: #e6bd4f; --c5: #a7b0bf;
    --k0: #7f9fe0; --k1: #e89468; --k2: #5cc0a2; --k3: #bd8bdb; --k4: #dbb94e; --k5: #e3799a;
    --k6: #86bfce; --k7: #98a1ae; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 1.05rem; margin: 32px 0 10px; padding-bottom: 4px; border-bottom: 1px solid var(--rule); }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 350px), 1fr)); }
figure { margin: 0; padding: 12px 12px 8px; background: var(--box); border: 1px solid var(--rule); border-radius: 8px; }
figcaption { font-weight: 600; font-size: 0.92rem; margin-bottom: 4px; overflow-wrap: anywhere; }
.unit { color: var(--soft); font-weight: 400; }
.note, .empty, footer { color: var(--soft); font-size: 0.82rem; margin: 4px 0 0; }
.empty { padding: 24px 0; text-align: center; }
footer { margin-top: 40px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0 14px; font-size: 0.88rem; }
.key { overflow-wrap: anywhere; }
.chip { display: inline-block; width: 11px; height: 11px; border-radius: 3px; background: currentColor; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg.wide { min-width: 640px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.curve { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
.band { fill: currentColor; opacity: 0.16; }
.bar, .stage { fill: currentColor; }
.stage { opacity: 0.92; }
.hover { fill: transparent; }
.hover:hover { fill: var(--soft); opacity: 0.16; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.k0 { color: var(--k0); } .k1 { color: var(--k1); } .k2 { color: var(--k2); } .k3 { color: var(--k3); }
.k4 { color: var(--k4); } .k5 { color: var(--k5); } .k6 { color: var(--k6); } .k7 { color: var(--k7); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; } thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
td { overflow-wrap: break-word; min-width: 9ch; }
summary { cursor: pointer; color: var(--accent); padding: 6px 0; }
"""
