package sandbox_test

import (
	"github.com/drowse-vm/drowse/sandbox/process"
)

// In tests stacks are kept very short, so that layers are joined all the time.
const maxStackOfTests = 5

func init() { process.SetStack(maxStackOfTests, 3) }
