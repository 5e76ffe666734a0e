// Package drowsefile reads the steps from which an image is made: a strict subset of the syntax of a Dockerfile.
//
// The one idea of this folder: text becomes a list of steps that leaves nothing to decide. Parse splits the text into
// instructions. Build inserts variables and the base image's settings. The resulting steps say which command runs with
// which environment, user and directory, and which files go where. Nothing here touches a file or a VM.
//
// The syntax is that of the Dockerfile reference (docs.docker.com/reference/dockerfile). What is not supported is an
// error with line and instruction, never ignored: a build that skips a step makes a wrong image.
package drowsefile
