() => [...document.querySelectorAll('img, b, iframe, object')].map(one => one.tagName).concat(
  [...document.querySelectorAll('*')].flatMap(one => [...one.attributes]
    .filter(a => a.name.startsWith('on')
      || /^(xlink:)?href$|^src$/.test(a.name) && !/^(#|data:|https:|plotly)/.test(a.value))
    .map(a => `${one.tagName} ${a.name}=${a.value}`)))
