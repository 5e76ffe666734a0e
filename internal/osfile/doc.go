// Package osfile does with files and Unix sockets what drowse needs in many places, each thing in one way.
//
// Code that must leave complete files after a loss of power writes through [FS]. In a program that is [OS].
// internal/test/faultfs has one that fails and loses power.
package osfile
