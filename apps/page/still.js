"use strict";
// first in the page, before Gradio's own scripts keep what they call.
//
// Gradio (6.31) counts the seconds that something takes to load, anew in every frame of the screen,
// and where what shows them is taken away before it has loaded, it counts on for ever: so does its
// first "Loading...", in every page. An open page then takes 0.07 of a core. This one shows no such
// seconds.
const frames = window.requestAnimationFrame.bind(window);
const counts = /^\(\)\s*=>\s*\{\s*[\w$]+\([\w$]+,\s*\(performance\.now\(\)\s*-/;
window.requestAnimationFrame = (draw) => (counts.test(Function.prototype.toString.call(draw)) ? 0 : frames(draw));
