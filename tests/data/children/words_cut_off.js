() => [...document.querySelectorAll('.plot')].flatMap(plot => { const room = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('.main-svg text')].filter(t => { const r = t.getBoundingClientRect();
    return r.width && (r.left < room.left - 1 || r.right > room.right + 1 || r.bottom > room.bottom + 1); })
    .map(t => plot.closest('figure').id + ': ' + t.textContent); })
