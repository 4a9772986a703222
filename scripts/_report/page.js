"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const table = $("#results");
  const rows = all("tr.row", table);
  const search = $("#search");
  const mechanism = $("#mechanism");
  const count = $("#count");
  const nothing = $("tr.none", table);
  const states = all(".filters button[data-status]");

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = states.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.status);
    let shown = 0;
    for (const row of rows) {
      const has = row.dataset.statuses.split(" ");
      const keep = words.every((w) => row.dataset.text.includes(w))
        && (!mechanism.value || row.dataset.mechanism === mechanism.value)
        && (!wanted.length || wanted.some((s) => has.includes(s)));
      row.hidden = !keep;
      shown += keep;
    }
    nothing.hidden = shown > 0;
    count.textContent = shown === rows.length ? `${rows.length} outputs` : `${shown} of ${rows.length} outputs`;
  }

  function sort(th) {
    const down = th.getAttribute("aria-sort") === "ascending";
    all("th[aria-sort]", table).forEach((other) => other.setAttribute("aria-sort", "none"));
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = th.dataset.key;
    const numeric = th.dataset.kind === "number";
    const value = (row) => (numeric ? Number(row.dataset[key]) : row.dataset[key]);
    const order = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b), undefined, { numeric: true }));
    rows.sort((a, b) => (down ? order(b, a) : order(a, b)));
    nothing.parentNode.append(...rows, nothing);
  }

  all("th[aria-sort] button", table).forEach((b) => b.addEventListener("click", () => sort(b.closest("th"))));
  states.forEach((b) => b.addEventListener("click", () => {
    b.setAttribute("aria-pressed", String(b.getAttribute("aria-pressed") !== "true"));
    filter();
  }));
  search.addEventListener("input", filter);
  mechanism.addEventListener("change", filter);
  all("button[data-copy]").forEach((b) => {
    b.hidden = false;
    b.addEventListener("click", async () => {
      const code = b.parentNode.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        b.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        b.textContent = "Selected";
      }
      setTimeout(() => { b.textContent = "Copy"; }, 1600);
    });
  });

  all("svg.heat").forEach((map) => {
    const [left, top, width, height, columns, rows] = map.dataset.grid.split(" ").map(Number);
    const [axis, across] = map.dataset.axes.split(" ");
    const [down, right] = map.dataset.block.split(" ").map(Number);
    const readout = map.closest(".heats").querySelector(".readout");
    const name = (word, i, block) => `${word} ${i * block}${block > 1 ? `–${(i + 1) * block - 1}` : ""}`;
    map.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse());
      const [i, j] = [Math.floor((at.y - top) / height), Math.floor((at.x - left) / width)];
      const inside = i >= 0 && j >= 0 && i < rows && j < columns;
      const cell = 2 * (i * columns + j);
      const value = inside && (parseInt(map.dataset.cells.slice(cell, cell + 2), 36) / 1295) * Number(map.dataset.top);
      readout.textContent = inside ? `${rows > 1 ? `${name(axis, i, down)}, ` : ""}${name(across, j, right)}: ${value.toPrecision(2)}` : "";
    });
    map.addEventListener("pointerleave", () => { readout.textContent = ""; });
  });

  let scroll = 0;
  addEventListener("hashchange", (event) => {
    const page = $(".output:target");
    const left = (event.oldURL.split("#")[1] || "").split(".")[0];
    if (page) {
      if (!left.startsWith("output-")) scroll = table.dataset.scroll || 0;
      scrollTo(0, 0);
    } else if (left.startsWith("output-") && !$(".output :target")) {
      scrollTo(0, scroll);
      const link = $(`tr.row a[href="#${left}"]`);
      if (link) link.focus({ preventScroll: true });
    }
  });
  table.addEventListener("click", () => { table.dataset.scroll = scrollY; });

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    const page = $(".output:target, .output:has(:target)");
    if (event.key === "Escape" && page) location.hash = "results-title";
    else if (event.key === "Escape" && event.target === search) { search.value = ""; filter(); }
    else if (typing) return;
    else if (event.key === "/" && !page) { event.preventDefault(); search.focus(); }
    else if (page && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
      const link = $(event.key === "ArrowLeft" ? "a[rel=prev]" : "a[rel=next]", page);
      if (link) location.hash = link.hash;
    }
  });
  $(".filters").hidden = false;
  filter();
})();
