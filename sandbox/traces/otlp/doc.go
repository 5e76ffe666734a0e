// Package otlp sends the spans of package traces to a collector, by OTLP over HTTP, as the environment says.
package otlp
