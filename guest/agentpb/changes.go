package agentpb

// Bounds of reported changes on a disk: in one answer, and in the exit of a command.
const (
	MaxChanges      = 512
	MaxChangesBytes = 64 << 10 // of paths
)

// Ops of a DiskChange.
const (
	ChangeAdded   = 1
	ChangeChanged = 2
	ChangeRemoved = 3
)

// ComparePaths orders paths like a walk that visits a directory before its contents, and siblings by the bytes of
// their names: a slash sorts before all other bytes that a name may have.
func ComparePaths(a, b string) int {
	for i := range min(len(a), len(b)) {
		x, y := a[i], b[i]
		switch {
		case x == y:
			continue
		case x == '/':
			return -1
		case y == '/':
			return 1
		}
		return int(x) - int(y)
	}
	return len(a) - len(b)
}
