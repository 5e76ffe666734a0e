package wire

// Paths of the initramfs.
const (
	ModuleDir   = "/modules"
	IndexFile   = ModuleDir + "/index.json"
	MountTag    = "host"           // mount tag of the host's file system (virtio 1.2 has 9P as device 9)
	StateDir    = "/run/hwkvm"     // in the machine: init's own copy of itself and the modules
	TempDir     = "/run/hwkvm/tmp" // in the machine: the command's TMPDIR, on tmpfs
	ModprobeArg = "modprobe"       // base name under which init acts as the kernel's module loader
)

// Module is one loadable kernel module of the initramfs.
type Module struct {
	// Deps are the modules that must be loaded before, in order.
	Deps []string `json:"deps,omitempty"`
	// Aliases are the names by which the kernel asks for it, as shell patterns.
	Aliases []string `json:"aliases,omitempty"`
	// Params are the parameters it is loaded with.
	Params string `json:"params,omitempty"`
}

// ModuleIndex lists the modules of the initramfs. Module NAME is the file ModuleDir/NAME.ko.
type ModuleIndex struct {
	// Boot lists the modules that init loads, each after what it depends on. The others load on the kernel's demand.
	Boot    []string          `json:"boot"`
	Modules map[string]Module `json:"modules"`
}
