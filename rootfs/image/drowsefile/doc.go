// Package drowsefile reads the steps from which an image is made: a strict part of the syntax of a Dockerfile.
//
// The one idea of this folder: text becomes a list of steps in which nothing is left to decide. Parse knows the lines,
// Build puts in variables and what the base image says, and what comes out says which command runs with which
// environment, user and directory, and which files go where. Nothing here touches a file or a VM.
//
// The syntax is that of the Dockerfile reference (docs.docker.com/reference/dockerfile). What of it is not known here
// is an error with line and instruction, never ignored: a build that leaves out a step makes an image that nobody asked
// for.
package drowsefile
