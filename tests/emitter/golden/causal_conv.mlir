// castiron emit --kernel causal_conv --shape 16x3 --tokens 4 --isa avx2 --threads 2
// 70 lines, sha256 97528a1d02e9c155e328e4d8bc80b9bad48e71c6a5f475093742c59f0a269b64
        %27:4 = scf.for %22 = %c0 to %5 step %c5 iter_args(%23 = %18, %24 = %19, %25 = %20, %26 = %21) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %28 = vector.load %m0[%22, %9] : memref<4x16xf32>, vector<8xf32>
          %29 = vector.load %m0[%22, %11] : memref<4x16xf32>, vector<8xf32>
          %30 = arith.mulf %23, %12 : vector<8xf32>
          %31 = llvm.call_intrinsic "llvm.arithmetic.fence"(%30) : (vector<8xf32>) -> vector<8xf32>
          %32 = math.fma %25, %14, %31 : vector<8xf32>
          %33 = math.fma %28, %16, %32 : vector<8xf32>
          vector.store %33, %m4[%22, %9] : memref<4x16xf32>, vector<8xf32>
          %34 = arith.mulf %24, %13 : vector<8xf32>
          %35 = llvm.call_intrinsic "llvm.arithmetic.fence"(%34) : (vector<8xf32>) -> vector<8xf32>
          %36 = math.fma %26, %15, %35 : vector<8xf32>
          %37 = math.fma %29, %17, %36 : vector<8xf32>
          vector.store %37, %m4[%22, %11] : memref<4x16xf32>, vector<8xf32>
          scf.yield %25, %26, %28, %29 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
