// Package process has the generated code of the service process.Process.
package process
