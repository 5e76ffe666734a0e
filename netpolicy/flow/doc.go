// Package flow is the flow table of an agent, as its programs keep it, and the log of its flows.
package flow
