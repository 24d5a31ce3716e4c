/* What pages do in the browser: cells that are text or links, tokens by colour, tables that reload.
   Everything of a run is put into the page as text (textContent, React's children), never as HTML. */
(function () {
  "use strict";

  const AT_ONCE = 5000; // tokens that are painted at once; a button paints as many again

  function go(event, address) {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    window.history.pushState({}, "", address);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    window.scrollTo(0, 0);
  }

  const renderers = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

  renderers.Said = function (props) {
    const text = props.value === undefined || props.value === null ? "" : String(props.value);
    return window.React.createElement("span", { title: text.length > 12 ? text : undefined }, text);
  };

  renderers.Address = function (props) {
    if (props.value === undefined || props.value === null) return null;
    const address = props.colDef.cellRendererParams.address.replace(/\{(\w+)\}/g, (_, name) =>
      encodeURIComponent(name === "value" ? props.value : props.data[name])
    );
    return window.React.createElement(
      "a",
      { href: address, onClick: (event) => go(event, address) },
      String(props.value)
    );
  };

  // How a table whose rows are all in the page is sorted; what is no number comes first.
  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  functions.byNumber = (first, second) => {
    const [a, b] = [first, second].map((each) => (Number.isNaN(Number(each)) ? -Infinity : Number(each)));
    return a === b ? 0 : a - b;
  };

  // Enter on any cell of a row opens what the row is about.
  document.addEventListener("keydown", (event) => {
    const cell = event.target.closest && event.target.closest(".ag-cell");
    if (!cell || event.key !== "Enter") return;
    const row = cell.closest(".ag-row");
    const link = document.querySelector(`.ag-row[row-index="${row.getAttribute("row-index")}"] a`);
    if (link) link.click();
  });

  // A page that is drawn again for new rows keeps the tables open that were.
  const open = new Set();
  document.addEventListener(
    "toggle",
    ({ target }) => target.isConnected && target.id && (target.open ? open.add(target.id) : open.delete(target.id)),
    true
  );
  new MutationObserver(() => {
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  }).observe(document.documentElement, { childList: true, subtree: true });

  function rgb(colour) {
    return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  }

  function shade(stops, value) {
    let [low, first] = stops[0];
    let colour = rgb(first);
    for (const [high, name] of stops.slice(1)) {
      const share = Math.min(1, Math.max(0, (value - low) / (high - low)));
      const next = rgb(name);
      colour = colour.map((each, at) => Math.round(each + share * (next[at] - each)));
      if (value <= high) break;
      low = high;
    }
    return colour;
  }

  function dress(element, stops, value) {
    if (value === null || value === undefined) {
      element.className = "given";
      return;
    }
    const [r, g, b] = shade(stops, value);
    element.style.background = `rgb(${r},${g},${b})`;
    element.style.color = 0.299 * r + 0.587 * g + 0.114 * b >= 140 ? "#000" : "#fff";
  }

  function number(value) {
    return value === null || value === undefined ? "–" : Number(value.toPrecision(5)).toString();
  }

  function describe(data, at) {
    const lines = [`token ${at}, id ${data.id[at]}: ${JSON.stringify(data.text[at])}`];
    if (data.version[at] === null) lines.push("not sampled");
    else lines.push(`policy version ${data.version[at]}`);
    for (const [name, values] of Object.entries({ ...data.values, ...data.plain }))
      if (values[at] !== null) lines.push(`${name} ${number(values[at])}`);
    return lines;
  }

  function paint(data, by) {
    const place = document.getElementById("painted");
    if (!data || !place) return window.dash_clientside.no_update;
    const note = document.getElementById("token-details");
    const stops = data.scales[by];
    let shown = 0;
    let chosen = -1;
    place.replaceChildren();

    function more() {
      const part = document.createDocumentFragment();
      const end = Math.min(data.text.length, shown + AT_ONCE);
      for (; shown < end; shown++) {
        const token = document.createElement("span");
        token.dataset.at = shown;
        if (data.heads[shown]) token.dataset.head = data.heads[shown];
        token.textContent = data.text[shown];
        dress(token, stops, data.values[by][shown]);
        part.append(token);
      }
      place.append(part);
      if (shown < data.text.length) {
        const button = document.createElement("button");
        button.textContent = `show more: ${shown} of ${data.text.length} tokens`;
        button.onclick = () => {
          button.remove();
          more();
        };
        place.append(button);
      }
    }

    function showDetails(at) {
      const token = place.children[at];
      if (!token || token.dataset.at === undefined) return;
      if (chosen >= 0 && place.children[chosen]) place.children[chosen].classList.remove("chosen");
      chosen = at;
      token.classList.add("chosen");
      note.textContent = describe(data, at).join(" · ");
    }

    more();
    note.textContent = "point at a token, or go through them with the arrow keys";
    place.onmouseover = (event) => event.target.dataset.at !== undefined && showDetails(Number(event.target.dataset.at));
    place.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      showDetails(Math.max(0, chosen + by));
    };
    const address = new URL(window.location.href);
    address.searchParams.set("by", by);
    window.history.replaceState(window.history.state, "", address);
    return legend(stops);
  }

  function legend(stops) {
    const entry = (props, text) => ({ namespace: "dash_html_components", type: "Span", props: { ...props, children: text } });
    const shown = stops.map(([value]) => {
      const [r, g, b] = shade(stops, value);
      const ink = 0.299 * r + 0.587 * g + 0.114 * b >= 140 ? "#000" : "#fff";
      return entry({ style: { background: `rgb(${r},${g},${b})`, color: ink } }, number(value));
    });
    return [...shown, entry({ className: "given" }, "not sampled")];
  }

  let round = 0;

  // Dash answers only the last of several requests: blocks of rows that a table needs at once are asked for one after another. A new
  // order or filter, and new rows, begin a round, which waits for no request of an earlier one.
  function ask_in_turn(source) {
    if (source.asks_in_turn) return;
    source.asks_in_turn = true;
    const ask = source.getRows;
    let sent = null;
    let asked_for = "";
    let waiting = [];
    const send = (params) => {
      sent = params;
      if (params) ask(params);
    };
    source.getRows = (params) => {
      const answer = params.successCallback;
      params.successCallback = (rows, count) => {
        answer(rows, count);
        // The last one is nearest to what is looked at.
        if (sent === params) send(waiting.pop() || null);
      };
      const wanted = round + JSON.stringify(params.sortModel);
      if (sent && wanted === asked_for) {
        waiting.push(params);
        return;
      }
      asked_for = wanted;
      waiting = [];
      send(params);
    };
  }

  // A table whose filter changes starts at the top.
  async function ask_again(asked) {
    const api = await window.dash_ag_grid.getApiAsync("grid");
    round += 1;
    if (api.getDisplayedRowCount()) api.ensureIndexVisible(0, "top");
    api.purgeInfiniteCache();
    return window.dash_clientside.no_update;
  }

  // A table reloads its visible rows when new rows are stored, and keeps its scroll position.
  async function look_again(revision) {
    if (document.getElementById("grid")) {
      const api = await window.dash_ag_grid.getApiAsync("grid");
      round += 1;
      api.refreshInfiniteCache();
    }
    return window.dash_clientside.no_update;
  }

  // The order that a heading was clicked to is part of the address.
  async function note_order(request) {
    const unchanged = window.dash_clientside.no_update;
    if (!request) return unchanged;
    ask_in_turn((await window.dash_ag_grid.getApiAsync("grid")).getGridOption("datasource"));
    const [order] = request.sortModel || [];
    const address = new URL(window.location.href);
    if (order) address.searchParams.set("sort", (order.sort === "desc" ? "-" : "") + order.colId);
    else address.searchParams.delete("sort");
    if (address.href !== window.location.href) window.history.replaceState(window.history.state, "", address);
    return unchanged;
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, { viewer: { paint, ask_again, look_again, note_order } });
})();
