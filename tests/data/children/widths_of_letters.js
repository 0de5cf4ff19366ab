([weight, font, letters]) => { const context = document.createElement("canvas").getContext("2d");
  context.font = `${weight} 1000px ${font}`;
  return letters.map((one) => context.measureText(one).width / 1000); }
