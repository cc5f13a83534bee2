// castiron emit --kernel causal_conv --shape 16x3 --tokens 4 --isa avx2 --threads 2
// 68 lines, sha256 faf7ca7b30a4889d56f15d3261e60048f3429983e78ed62a0ff333cd810d7138
        %27:4 = scf.for %22 = %c0 to %5 step %c5 iter_args(%23 = %18, %24 = %19, %25 = %20, %26 = %21) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %28 = vector.load %m0[%22, %9] : memref<4x16xf32>, vector<8xf32>
          %29 = vector.load %m0[%22, %11] : memref<4x16xf32>, vector<8xf32>
          %30 = arith.mulf %23, %12 : vector<8xf32>
          %31 = math.fma %25, %14, %30 : vector<8xf32>
          %32 = math.fma %28, %16, %31 : vector<8xf32>
          vector.store %32, %m4[%22, %9] : memref<4x16xf32>, vector<8xf32>
          %33 = arith.mulf %24, %13 : vector<8xf32>
          %34 = math.fma %26, %15, %33 : vector<8xf32>
          %35 = math.fma %29, %17, %34 : vector<8xf32>
          vector.store %35, %m4[%22, %11] : memref<4x16xf32>, vector<8xf32>
          scf.yield %25, %26, %28, %29 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
