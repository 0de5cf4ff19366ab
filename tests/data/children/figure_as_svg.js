([plot]) => { const place = document.getElementById("place");
  const { data, layout } = JSON.parse(plot);
  return Plotly.newPlot(place, data, layout, { staticPlot: true })
    .then(() => Plotly.Snapshot.toSVG(place, "svg", 1)); }
