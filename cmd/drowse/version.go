package main

import "runtime/debug"

// buildVersion is set by the linker: see the Makefile.
var buildVersion string

// version returns what this program was built from.
func version() string {
	if buildVersion != "" {
		return buildVersion
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version
}
