// On a narrow screen labels at the ends of lines would take half the figure: a legend below takes their place.
(function () {
  function fit(plot) {
    const labels = (plot.layout.annotations || []).filter(function (a) { return a.name === "direct"; });
    if (!labels.length) return;
    const narrow = plot.clientWidth < 560;
    if (plot.dataset.narrow === String(narrow)) return;
    plot.dataset.narrow = String(narrow);
    plot.dataset.margin = plot.dataset.margin || plot.layout.margin.r;
    const change = { showlegend: narrow, "margin.r": narrow ? 12 : Number(plot.dataset.margin) };
    plot.layout.annotations.forEach(function (a, i) {
      if (a.name === "direct") change["annotations[" + i + "].visible"] = !narrow;
    });
    if (!narrow) plot._fullLayout._reservedMargin = {}; // plotly keeps the room of a legend that has gone
    window.Plotly.relayout(plot, change);
  }
  function all() { document.querySelectorAll(".js-plotly-plot").forEach(fit); }
  window.addEventListener("load", all);
  window.addEventListener("resize", all);
})();
