from tests.emulator import build

build()
