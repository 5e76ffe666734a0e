// Package page makes one HTML page from the reports of benchmarks: a file that stands alone, without scripts and
// without anything from a network.
//
// Its input may come from another version or another program, or be hostile. The page leaves out what it does not
// know. Missing figures stay missing and are not drawn as zero. The page names what does not fit, and escapes
// every string.
package page
