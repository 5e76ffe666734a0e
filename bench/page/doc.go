// Package page makes one HTML page of what benchmarks have printed: a file that stands
// alone, without scripts and without anything from a network.
//
// Its input may be of another version, of another program, or hostile: what it does not
// know is left out, what is missing stays missing and is not drawn as zero, what does not
// fit is named on the page, and every string is escaped.
package page
