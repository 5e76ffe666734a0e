// Package chromium drives a Chromium without a window, for tests of pages.
//
// It speaks the Chrome DevTools Protocol over the pipe that --remote-debugging-pipe opens at descriptors 3 and 4: JSON
// messages, each ended by a zero byte. So there is no port that others could connect to, and no driver and no library
// between test and browser. Source: https://chromedevtools.github.io/devtools-protocol/.
package chromium
