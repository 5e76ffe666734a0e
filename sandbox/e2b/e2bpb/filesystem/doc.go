// Package filesystem has the generated code of the service filesystem.Filesystem.
package filesystem
