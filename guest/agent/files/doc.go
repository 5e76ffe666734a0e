// Package files serves the guest's files to the host: single ones, copies of files and trees that can be resumed,
// watches, and directories to be emptied before a capture.
package files
