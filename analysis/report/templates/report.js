"use strict";
// Tables that sort and search, and queries that open when a link leads to them. Without scripts all of it stays readable.
(function () {
  const SEARCHED = 15; // shorter tables need no search
  const TIME = { ns: 1, "µs": 1e3, ms: 1e6, s: 1e9, min: 6e10, h: 3.6e12 };
  const PREFIX = { k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18 };

  // "3 min 20 s", "1.2 TB/s", "12,345", "< 0.1 %": the number that it stands for; null for "–" and words.
  function number(text) {
    const pattern = /([+-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?)[\s\u202f]*(min|ns|µs|ms|s|h|%|[kMGTPE]?(?:B|FLOP|OP|Hz)[A-Za-z/]*)?(?![A-Za-z])/gy;
    const plain = text.replace(/^[<~±\s\u202f]+/, "");
    let total = null;
    for (let found = pattern.exec(plain); found; found = pattern.exec(plain)) {
      const unit = found[2] || "";
      const scale = TIME[unit] || (unit.length > 1 && PREFIX[unit[0]]) || 1;
      const value = Number(found[1].replaceAll(",", "")) * scale;
      if (total !== null && !TIME[unit]) { break; }
      total = (total || 0) + value;
      if (!TIME[unit]) { break; }
      while (/[\s\u202f]/.test(plain[pattern.lastIndex] || "")) { pattern.lastIndex += 1; }
    }
    return total;
  }

  function first(cell) { // the cell's own line, without the smaller one below it
    const node = cell.firstChild;
    return ((node && node.textContent) || "").trim();
  }

  function sorter(column, isNumber, direction) {
    return function (a, b) {
      const x = first(a.cells[column]), y = first(b.cells[column]);
      if (!isNumber) { return direction * x.localeCompare(y, "en", { numeric: true }); }
      const m = number(x), n = number(y);
      if (m === null || n === null) { return (m === null) - (n === null); } // what is missing stays last
      return direction * (m - n);
    };
  }

  function sortable(table) {
    const body = table.tBodies[0], original = Array.from(body.rows);
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach(function (head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort by this column";
      button.append(...head.childNodes);
      head.append(button);
      const isNumber = head.classList.contains("n");
      button.addEventListener("click", function () {
        const now = head.getAttribute("aria-sort");
        const next = isNumber
          ? { descending: "ascending", ascending: "none" }[now] || "descending"
          : { ascending: "descending", descending: "none" }[now] || "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (next !== "none") { head.setAttribute("aria-sort", next); }
        const rows = next === "none" ? original : original.slice().sort(sorter(column, isNumber, next === "ascending" ? 1 : -1));
        body.append(...rows);
      });
    });
  }

  function searchable(table) {
    const rows = Array.from(table.tBodies[0].rows);
    const texts = rows.map(function (row) {
      const titles = Array.from(row.querySelectorAll("[title]"), (node) => node.title);
      return [row.textContent, ...titles].join("\n").toLowerCase();
    });
    const box = document.createElement("label"), input = document.createElement("input"), count = document.createElement("span");
    box.className = "search";
    input.type = "search";
    input.placeholder = "Search " + rows.length + " rows";
    input.setAttribute("aria-label", "Search this table");
    count.setAttribute("role", "status");
    box.append(input, count);
    table.closest(".scroll").before(box);
    input.addEventListener("input", function () {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach(function (row, place) {
        const isThere = wanted.every((word) => texts[place].includes(word));
        row.hidden = !isThere;
        shown += isThere ? 1 : 0;
      });
      count.textContent = wanted.length ? shown + " of " + rows.length : "";
    });
  }

  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target && target.closest("details");
    if (details) { details.open = true; target.scrollIntoView(); }
  }

  document.querySelectorAll("table.data").forEach(function (table) {
    if (table.tBodies[0].rows.length > 1) { sortable(table); }
    if (table.tBodies[0].rows.length > SEARCHED) { searchable(table); }
  });
  window.addEventListener("hashchange", reveal);
  reveal();
})();
