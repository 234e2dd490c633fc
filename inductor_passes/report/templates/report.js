"use strict";
(function () {
  const SVG = (document.querySelector("svg") || {}).namespaceURI;
  document.documentElement.classList.add("js");

  function humanUs(us) {
    const size = Math.abs(us);
    if (size < 5e-4) return "0";
    const scaled = size < 1 ? [us * 1e3, "ns"] : size < 1e3 ? [us, "µs"] : size < 1e6 ? [us / 1e3, "ms"] : [us / 1e6, "s"];
    return Number(scaled[0].toPrecision(6)) + " " + scaled[1];
  }

  function ticks(from, to, about) {
    const raw = (to - from) / about;
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const list = [];
    for (let i = Math.ceil(from / step); i * step <= to; i++) list.push(i * step);
    return list;
  }

  function element(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function charWidth(labels) {
    const sample = element("text", {}, "all_gather_mm 0123456789");
    labels.append(sample);
    // Names are wider than the sample where they have many m and w.
    const width = 1.1 * sample.getComputedTextLength() / sample.textContent.length;
    sample.remove();
    return Math.max(width, 4);
  }

  function timeline(figure) {
    const scale = Number(figure.dataset.scale);
    const plots = Array.from(figure.querySelectorAll(".plot")).map((plot) => ({
      plot,
      boxes: plot.querySelector(".boxes"),
      grid: plot.querySelector(".grid"),
      labels: plot.querySelector(".labels"),
      axis: plot.querySelector(".axis"),
      height: Number(plot.dataset.lanes),
      rects: Array.from(plot.querySelectorAll(".boxes rect")).map((rect) => ({
        start: Number(rect.getAttribute("x")),
        width: Number(rect.getAttribute("width")),
        y: Number(rect.getAttribute("y")) + Number(rect.getAttribute("height")) / 2,
        style: rect.getAttribute("class"),
        title: rect.firstElementChild,
      })),
    }));
    const range = figure.querySelector(".range");
    let from = 0, to = scale, queued = false;
    if (!(scale > 0)) return;

    function paint() {
      queued = false;
      const width = to - from;
      for (const p of plots) {
        const px = p.plot.clientWidth;
        if (!px) continue;
        const perUs = px / width;
        p.boxes.setAttribute("viewBox", from + " 0 " + width + " " + p.height);
        const marks = ticks(from, to, Math.max(3, px / 120));
        p.grid.replaceChildren(...marks.map((t) => {
          const x = (t - from) * perUs;
          return element("line", { x1: x, x2: x, y1: 0, y2: p.height });
        }));
        p.axis.replaceChildren(...marks.map((t) => {
          const x = (t - from) * perUs;
          const side = x < 20 ? "start" : x > px - 24 ? "end" : "middle";
          return element("text", { x, y: p.height + 15, style: "text-anchor:" + side }, humanUs(t));
        }));
        const texts = [], charPx = charWidth(p.labels);
        for (const r of p.rects) {
          const low = Math.max(r.start, from), high = Math.min(r.start + r.width, to);
          const room = (high - low) * perUs - 8;
          if (room < 24) continue;
          let text = r.title.textContent.split("\n", 1)[0];
          if (text.length * charPx > room) {
            const fits = Math.floor(room / charPx) - 1;
            if (fits < 6) continue;
            text = text.slice(0, fits) + "…";
          }
          texts.push(element("text", { x: ((low + high) / 2 - from) * perUs, y: r.y, class: r.style }, text));
        }
        p.labels.replaceChildren(...texts);
      }
      range.textContent = width < scale ? humanUs(from) + " to " + humanUs(to) : "";
    }

    function show(low, high) {
      const width = Math.min(scale, Math.max(high - low, scale / 5000));
      from = Math.min(Math.max(0, low), scale - width);
      to = from + width;
      if (!queued) { queued = true; requestAnimationFrame(paint); }
    }

    function zoom(factor, at) {
      const centre = at === undefined ? (from + to) / 2 : at;
      show(centre - (centre - from) * factor, centre + (to - centre) * factor);
    }

    const steps = {
      in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, scale),
      left: () => show(from - (to - from) / 4, to - (to - from) / 4),
      right: () => show(from + (to - from) / 4, to + (to - from) / 4),
    };
    const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
    figure.querySelectorAll(".zoom button").forEach((b) => b.addEventListener("click", steps[b.dataset.step]));
    for (const p of plots) {
      const at = (event) => from + (event.clientX - p.plot.getBoundingClientRect().left) / p.plot.clientWidth * (to - from);
      p.plot.addEventListener("keydown", (event) => {
        if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); steps[keys[event.key]](); }
      });
      p.plot.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), at(event));
      }, { passive: false });
      p.plot.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 2 : 0.5, at(event)));
      p.plot.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        const x = event.clientX, low = from, high = to;
        p.plot.setPointerCapture(event.pointerId);
        p.plot.classList.add("dragging");
        const move = (e) => {
          const shift = (e.clientX - x) / p.plot.clientWidth * (high - low);
          show(low - shift, high - shift);
        };
        const end = () => {
          p.plot.classList.remove("dragging");
          p.plot.removeEventListener("pointermove", move);
        };
        p.plot.addEventListener("pointermove", move);
        p.plot.addEventListener("pointerup", end, { once: true });
        p.plot.addEventListener("pointercancel", end, { once: true });
      });
    }
    new ResizeObserver(() => show(from, to)).observe(figure);
    paint();
  }

  function searchable(box) {
    const input = box.querySelector("input[type=search]");
    const body = box.querySelector("tbody");
    const count = box.querySelector(".shown");
    const rows = Array.from(body.rows);
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const filter = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => {
        const fits = words.every((word) => texts[i].includes(word));
        row.hidden = !fits;
        shown += fits;
      });
      count.textContent = words.length ? shown + " of " + rows.length : "";
    };
    input.addEventListener("input", filter);
    box.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
      const head = button.parentElement, column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      head.parentElement.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const cell = row.cells[column];
        return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
      };
      const sorted = rows.slice().sort((a, b) => {
        const x = value(a), y = value(b);
        const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
        return down ? -order : order;
      });
      body.replaceChildren(...sorted);
    }));
  }

  document.querySelectorAll(".timeline").forEach(timeline);
  document.querySelectorAll(".searchable").forEach(searchable);
})();
