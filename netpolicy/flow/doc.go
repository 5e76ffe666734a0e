// Package flow is the flow table of an endpoint, as its programs keep it, and the log of its flows.
package flow
