// Package osfile does with files and Unix sockets what drowse does in many places, each thing in one way.
//
// Code that must leave whole files behind after a loss of power writes through [FS], which is [OS] in a program;
// internal/test/faultfs has one that fails, and loses power.
package osfile
