// Package files serves the guest's files to the host: single ones, resumable copies of files and trees, watches, and
// directories that are emptied before a capture.
package files
