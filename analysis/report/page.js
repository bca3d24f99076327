// What a reader may do with the page: hover over points, zoom, and pick a run to see its configuration and command.
// Text of files becomes text nodes alone. Without this script the page shows the same figures as still pictures.
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const data = read("moereplay-data");
  const figures = read("moereplay-figures");
  const runs = new Map(data.runs.map((run) => [run.identity, run]));
  const views = new Map();
  const chosen = document.getElementById("chosen");

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  // -- figures as words ------------------------------------------------------------------------------------------
  const digits = (value) => Number(value.toPrecision(4)).toLocaleString("en");
  const share = (value) => `${(100 * value).toFixed(2)}%`;
  const WORDS = [
    ["tokens_per_s", "tokens/s", digits],
    ["tpot_ms", "TPOT, ms", digits],
    ["ttft_mean_ms", "TTFT, ms", digits],
    ["hit_rate", "hit rate", share],
    ["collisions_per_miss", "collisions per miss", share],
    ["gb_moved", "GB moved", digits],
  ];
  const worded = (run) =>
    WORDS.filter(([name]) => run.figures[name] !== null).map(([name, head, shown]) => {
      const ends = run.interval[name];
      const range = ends ? ` (${shown(ends.low)} to ${shown(ends.high)})` : "";
      return [head, shown(run.figures[name]) + range];
    });

  // -- one run ---------------------------------------------------------------------------------------------------
  const copyButton = (text) => {
    const button = element("button", "Copy the command", { type: "button" });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        const command = button.parentElement.querySelector("pre");
        getSelection().selectAllChildren(command);
        button.textContent = "Selected: press Ctrl+C";
      }
    });
    return button;
  };

  const command = (run) => {
    const shown = element("pre", undefined, { tabindex: "0", "aria-label": "Command" });
    shown.append(element("code", run.command));
    const files = Object.entries(run.files).map(([name, held]) => {
      const box = element("details");
      box.append(element("summary", `${name}, which it reads`), element("pre", JSON.stringify(held)));
      return box;
    });
    return [shown, copyButton(run.command), ...files];
  };

  const pairs = (found) => {
    const list = element("dl");
    for (const [name, value] of found) list.append(element("dt", name), element("dd", value));
    return list;
  };

  const setting = (value) =>
    value === "" || value === null || (Array.isArray(value) && !value.length) ? "none" : Array.isArray(value) ? JSON.stringify(value) : String(value);

  const about = (run) => [
    element("h3", `${run.label}: ${run.group}`),
    pairs(worded(run)),
    element("p", "The command that repeats it:"),
    ...command(run),
    pairs(Object.entries(run.config).map(([name, value]) => [name, setting(value)])),
    pairs(Object.entries({ identity: run.identity, ...run.about }).map(([name, value]) => [name, setting(value)])),
  ];

  const pick = (identity, figure) => {
    const run = runs.get(identity);
    if (!run) return;
    document.getElementById("about").replaceChildren(...about(run));
    chosen.value = identity;
    for (const row of document.querySelectorAll("tr[data-identity]")) row.classList.toggle("picked", row.dataset.identity === identity);
    for (const view of views.values()) view.signal("picked", identity).runAsync();
    for (const box of document.querySelectorAll(".picked-here")) box.replaceChildren();
    if (!figure) return;
    const words = worded(run).map((pair) => pair.join(" ")).join("; ");
    const line = element("p", `${run.label}: ${words}. `);
    line.append(element("a", "All settings", { href: "#one" }));
    figure.querySelector(".picked-here").replaceChildren(line, ...command(run));
  };

  // -- drawing ---------------------------------------------------------------------------------------------------
  const tip = element("div", "", { class: "tip", hidden: "", "aria-hidden": "true" });
  document.body.append(tip);
  const hover = (event, item) => {
    const run = item && item.datum && runs.get(item.datum.identity);
    tip.hidden = !run;
    if (!run) return;
    tip.textContent = [run.label, ...worded(run).map((pair) => pair.join(": "))].join("\n");
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + tip.offsetHeight + 20 > innerHeight ? -tip.offsetHeight - 14 : 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${event.clientY + above}px`;
  };

  // `ast`: expressions are interpreted, so that the page needs no eval.
  const OPTIONS = { mode: "vega", ast: true, renderer: "svg", actions: false, tooltip: false, defaultStyle: false };
  const draw = async (box) => {
    const name = box.dataset.figure;
    const figure = box.closest("figure");
    figure.querySelector(".plot").classList.add("drawn"); // before the width of the container is read
    const { view } = await vegaEmbed(box, figures[name].spec, OPTIONS);
    views.set(name, view);
    if (chosen) view.signal("picked", chosen.value).runAsync();
    view.addEventListener("mousemove", hover);
    view.addEventListener("mouseout", () => (tip.hidden = true));
    view.addEventListener("click", (_, item) => item && item.datum && pick(item.datum.identity, figure));
  };

  const FACTOR = { in: 0.6, out: 1 / 0.6 };
  const zoomed = ([low, high], factor, logarithmic) => {
    const [from, to] = logarithmic ? [Math.log(low), Math.log(high)] : [low, high];
    const middle = (from + to) / 2;
    const ends = [middle - ((to - from) / 2) * factor, middle + ((to - from) / 2) * factor];
    return logarithmic ? ends.map(Math.exp) : ends;
  };
  const zoom = (name, how) => {
    const view = views.get(name);
    for (const axis of ["x", "y"]) {
      const ends = how === "all" ? null : zoomed(view.scale(axis).domain(), FACTOR[how], figures[name].logarithmic[axis]);
      view.signal(`zoom_${axis}`, ends);
    }
    view.runAsync();
  };

  // -- beginning -------------------------------------------------------------------------------------------------
  document.documentElement.classList.add("scripts");
  if (chosen) {
    chosen.addEventListener("change", () => pick(chosen.value));
    pick(chosen.value);
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && button.dataset.show) {
      pick(button.dataset.show);
      document.getElementById("one").focus();
    }
    if (button && button.dataset.zoom && views.has(button.dataset.of)) zoom(button.dataset.of, button.dataset.zoom);
  });
  addEventListener("beforeprint", () => {
    for (const box of document.querySelectorAll("details:not(.points)")) box.open = true;
  });
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((each) => each.isIntersecting)) {
        seen.unobserve(entry.target);
        draw(entry.target.querySelector(".live"));
      }
    },
    { rootMargin: "400px" },
  );
  for (const plot of document.querySelectorAll(".plot")) seen.observe(plot);
})();
